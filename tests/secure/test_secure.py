"""A real KDC, secure HDFS and YARN with SPNEGO: who one is, what ranks may, what is refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from hopsgpu import devcluster
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager
from hopsgpu.devcluster.realm import REALM, Realm
from hopsgpu.storage.hadoop_conf import HadoopConf
from tests.bounds import HANG_SECONDS
from tests.cluster.test_submit import application_in, client_env, ends, started, submitting
from tests.contention import start_script
from tests.docs.pages import ROOT

Env = dict[str, str]

WHOLE = """
    from pathlib import Path
    import hopsgpu

    def train():
        gang = hopsgpu.context()
        rows = sum(len(batch["id"]) for batch in gang.data.batches(64))
        Path("state").write_text("half done")
        gang.save_checkpoint("state", 1)
        (gang.model_dir / f"part-{gang.rank}").write_text("weights")
        print("rank", gang.rank, "has", rows)
        return rows

    spark = hopsgpu.session("whole")
    result = hopsgpu.launch(
        train, workers=2, data=spark.range(1000), model="secret", name="whole",
        memory_per_worker="512m", progress="off",
    )
    print("rows", sum(result.values))
    print("model", result.model.url)
    print("run", result.run_id)
    print("warnings", *result.warnings)
"""


def run(env: Mapping[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def hopsgpu(env: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command, as a person types it."""
    return run(env, "-m", "hopsgpu.cli.main", *arguments)


@pytest.fixture(scope="module")
def told(alice: Env, manager: ResourceManager) -> dict[str, str]:
    """What a whole training of alice's has told, by its first word; she has run kinit alone."""
    # Hadoop ignores it where Kerberos is on.
    script = start_script({**alice, "HADOOP_USER_NAME": "mallory"}, WHOLE)
    out, errors = script.communicate(timeout=HANG_SECONDS)
    assert script.returncode == 0, errors
    assert manager.gpus() == (0, 4)
    return dict(re.findall(r"^(\w+) (.*)$", out, re.MULTILINE))


def test_ranks_read_write_and_publish_with_tokens_alone(told: dict[str, str]) -> None:
    """fs.defaultFS names a host, and Hadoop's tokens an address; containers have no ticket."""
    assert told["rows"] == "1000"
    assert re.search(r"hdfs://localhost:\d+/user/alice/hopsgpu/models/secret/1$", told["model"])


def test_kinit_alone_is_warned_of_with_the_date(told: dict[str, str]) -> None:
    end = time.strftime("%Y-%m-%d", time.localtime(time.time() + 7 * 86_400 - 120))
    assert f"this run loses HDFS at {end}" in told["warnings"]
    assert "only with a keytab" in told["warnings"]


def test_alice_finds_her_runs_models_and_logs(alice: Env, told: dict[str, str]) -> None:
    runs, models, logs, gpus = (
        hopsgpu(alice, *command)
        for command in (["runs"], ["models"], ["logs", told["run"]], ["gpus"])
    )
    assert told["run"] in runs.stdout, runs.stderr
    assert "secret" in models.stdout, models.stderr
    assert "rank 1 has 500" in logs.stdout, logs.stderr
    assert "alice could get 4" in gpus.stdout, gpus.stderr


@pytest.mark.parametrize("what", ["runs", "models"])
def test_bob_reads_nothing_of_hers(
    bob: Env, told: dict[str, str], what: str, tmp_path: Path
) -> None:
    root = told["model"].partition("/models/")[0]
    seen = hopsgpu(bob, what, "--root", root)
    assert seen.returncode == 1
    assert "Permission denied: user=bob" in seen.stderr, seen
    taken = hopsgpu(bob, "models", "--root", root, "download", "secret", str(tmp_path / "m"))
    assert taken.returncode == 1 and not (tmp_path / "m").exists()


QUEUE = """
    import sys
    import hopsgpu
    from hopsgpu.errors import StoreError
    from hopsgpu.storage.lake import LakePath
    from hopsgpu.backends.gang_queue import make_queue_dir

    queue = make_queue_dir(LakePath(sys.argv[1]), "hopsgpu", "queue")
    if sys.argv[2] == "file":
        (queue / "turn-alices").write(b"")
    else:
        for act in (lambda f: f.remove(), lambda f: f.rename(queue / "turn-bobs")):
            try:
                act(queue / "turn-alices")
            except StoreError as error:
                print("refused:", error.kind)
    print(queue.names())
"""


def test_bob_ends_no_turn_of_hers(alice: Env, bob: Env, told: dict[str, str]) -> None:
    lake = re.sub(r"/user/.*", "/tmp", told["model"])
    for env, word in ((alice, "file"), (bob, "end")):
        script = start_script(env, QUEUE, lake, word)
        out, errors = script.communicate(timeout=HANG_SECONDS)
        assert "('turn-alices',)" in out, errors
    assert out.count("refused: permission") == 2


HELD = """
    import sys
    import hopsgpu

    hopsgpu.session("held")
    with hopsgpu.hold(workers=1, memory_per_worker="512m", progress="off") as gang:
        print("held", flush=True)
        sys.stdin.readline()
        print("value", gang.launch(lambda: 42).value)
"""
STRANGER = """
    import asyncio, sys
    from hopsgpu.control.channel import ChannelError
    from hopsgpu.control.handshake import connect

    async def join(host, port):
        try:
            channel = await connect(host, int(port), b"a guess" * 5)
        except (ChannelError, OSError) as error:
            print("refused", type(error).__name__, error)
        else:
            print("JOINED", channel)

    for address in sys.argv[1:]:
        asyncio.run(asyncio.wait_for(join(*address.split(":")), 60))
"""


def test_bob_does_not_join_her_driver(
    alice: Env, bob: Env, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    driver = start_script(alice, HELD)
    assert driver.stdin is not None and driver.stdout is not None
    try:
        assert driver.stdout.readline() == "held\n"
        sockets = psutil.Process(driver.pid).net_connections("tcp")
        listening = [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]
        stranger = start_script(bob, STRANGER, *(f"{a.ip}:{a.port}" for a in listening))
        out, errors = stranger.communicate(timeout=HANG_SECONDS)
        assert stranger.returncode == 0, errors
        assert "JOINED" not in out and out.count("refused") == len(listening)
        # By the handshake, and not because nobody listens.
        assert "refused ChannelError" in out, out
        out, errors = driver.communicate("go on\n", timeout=HANG_SECONDS)
    finally:
        driver.kill()
    assert "value 42" in out, errors


def test_a_gateway_acts_for_another_user(
    alice: Env, bob: Env, manager: ResourceManager, gpus_back: Callable[[], int], tmp_path: Path
) -> None:
    script = tmp_path / "alone" / "proxied.py"
    script.parent.mkdir()
    script.write_text(textwrap.dedent(WHOLE).replace("secret", "proxied"))
    acting = {**bob, "HADOOP_PROXY_USER": "alice"}
    by_variable = run(acting, str(script))
    assert by_variable.returncode == 0, by_variable.stderr[-3000:]
    ((code, by_option, errors),) = ends(
        started(submitting("--proxy-user", "alice", str(script)), client_env(bob))
    )
    assert code == 0, errors[-3000:]
    for number, out in enumerate((by_variable.stdout, by_option), 1):
        assert re.search(
            rf"^model \S+/user/alice/hopsgpu/models/proxied/{number}$", out, re.MULTILINE
        ), out
    # Her runs are hers, whoever started them; and are not those of the gateway.
    assert hopsgpu(alice, "runs").stdout.count("proxied") == 2
    assert hopsgpu(acting, "runs").stdout == hopsgpu(alice, "runs").stdout
    assert "proxied" not in hopsgpu(bob, "runs").stdout
    seen = hopsgpu(acting, "doctor", "--no-session").stdout
    assert re.search(rf"^ok +kerberos +alice \(bob@{REALM}\)", seen, re.MULTILINE), seen


NEW_TOKENS = """
    import sys, time
    import hopsgpu
    from hopsgpu.backends.spark.jvm import Jvm

    spark = hopsgpu.session("tokens", conf={
        "spark.kerberos.principal": "alice",
        "spark.kerberos.keytab": sys.argv[1],
    })
    jvm = Jvm(spark.sparkContext)
    print("planned", jvm.seconds_to_new_tokens())
    before = jvm.hdfs_tokens()
    jvm.plan_new_tokens()
    deadline = time.monotonic() + 900
    while jvm.hdfs_tokens() == before and time.monotonic() < deadline:
        time.sleep(0.1)  # Spark tells nobody of new tokens
    print("new", before != jvm.hdfs_tokens() != b"")
"""


def test_spark_gets_tokens_when_it_is_asked(cluster_env: Env, realm: Realm) -> None:
    script = start_script(cluster_env, NEW_TOKENS, realm.keytab("alice"))
    out, errors = script.communicate(timeout=HANG_SECONDS)
    assert "new True" in out, out + errors
    planned = re.search(r"^planned ([\d.]+)$", out, re.MULTILINE)
    # Three quarters of a day, less the start of the session.
    assert planned is not None and 0.7 * 86_400 < float(planned[1]) <= 0.75 * 86_400


NO_TICKET = "there is no Kerberos ticket: run kinit, or name a keytab"
SESSION = "import hopsgpu; hopsgpu.session('none')"
COMMANDS = {
    "session": ["-c", SESSION],
    "gpus": ["-m", "hopsgpu.cli.main", "gpus"],
    "runs": ["-m", "hopsgpu.cli.main", "runs"],
    "models": ["-m", "hopsgpu.cli.main", "models"],
    "submit": ["-m", "hopsgpu.cli.main", "submit", str(ROOT / "examples" / "train_job.py")],
}


def last_line(env: Mapping[str, str], command: list[str]) -> str:
    began = time.monotonic()
    ran = run(env, *command)
    assert ran.returncode == 1
    # Told before a JVM starts.
    assert time.monotonic() - began < 30
    assert "Exception" not in ran.stderr and "java" not in ran.stderr.lower(), ran.stderr
    return ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_ticket_one_line_says_so(cluster_env: Env, realm: Realm, command: str) -> None:
    env = {**cluster_env, "KRB5CCNAME": realm.tickets("none")}
    assert NO_TICKET in last_line(env, COMMANDS[command])


def test_an_expired_ticket(signed_in: Callable[..., Env]) -> None:
    env = signed_in("alice", "-l", "1")
    while subprocess.run(["klist", "-s"], env=env, check=False).returncode == 0:
        time.sleep(0.2)  # tickets end by themselves
    told = last_line(env, COMMANDS["session"])
    assert re.search(rf"the Kerberos ticket of alice@{REALM} expired at .*: run kinit", told), told


def keytab_options(keytab: Path, principal: str) -> list[str]:
    return ["--principal", principal, "--keytab", str(keytab)]


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ("bob", "does not fit the principal (Keytab contains no suitable keys for bob@"),
        ("nobody", "does not fit the principal"),
    ],
)
def test_a_keytab_of_another(cluster_env: Env, realm: Realm, user: str, words: str) -> None:
    given = keytab_options(realm.keytab("alice"), user)
    command = [*COMMANDS["submit"][:3], *given, COMMANDS["submit"][3]]
    told = last_line(cluster_env, command)
    assert f"no Kerberos ticket for {user} from the keytab" in told and words in told


def test_a_kdc_out_of_reach(cluster_env: Env, realm: Realm, tmp_path: Path) -> None:
    conf = re.sub(r"(kdc = 127.0.0.1):\d+", r"\1:9", realm.client_conf.read_text())
    (tmp_path / "krb5.conf").write_text(conf)
    env = {**cluster_env, "KRB5_CONFIG": str(tmp_path / "krb5.conf")}
    given = keytab_options(realm.keytab("alice"), "alice")
    told = last_line(env, [*COMMANDS["submit"][:3], *given, COMMANDS["submit"][3]])
    assert "no KDC answers (Cannot contact any KDC for realm" in told


def test_a_kdc_that_died_is_brought_back(
    cluster_dir: Path, cluster_env: Env, realm: Realm, tmp_path: Path
) -> None:
    (kdc,) = (d.pid for d in devcluster.status(cluster_dir).daemons if d.name == "kdc")
    os.kill(kdc, signal.SIGKILL)
    env = {**cluster_env, "KRB5CCNAME": f"FILE:{tmp_path / 'tickets'}"}
    sign_in = ["kinit", "-k", "-t", str(realm.keytab("alice")), "alice"]
    assert subprocess.run(sign_in, env=env, check=False, capture_output=True).returncode
    assert devcluster.up(cluster_dir).started == ("kdc",)
    subprocess.run(sign_in, env=env, check=True)


def test_the_doctor_says_who_one_is_and_what_is_missing(
    alice: Env, cluster_env: Env, realm: Realm
) -> None:
    seen = hopsgpu(alice, "doctor", "--no-session")
    assert re.search(r"^ok +kerberos +alice \(alice@", seen.stdout, re.MULTILINE), seen
    assert re.search(r"^ok +spnego +http://\S+ requires Kerberos", seen.stdout, re.MULTILINE)
    assert "RPC: authentication, blocks: authentication" in seen.stdout
    none = hopsgpu({**cluster_env, "KRB5CCNAME": realm.tickets("none")}, "doctor", "--no-session")
    assert none.returncode == 1 and NO_TICKET in none.stdout
    assert "start YARN" not in none.stdout


def test_cluster_mode_is_refused_without_a_keytab_and_works_with_one(
    alice: Env,
    cluster_env: Env,
    realm: Realm,
    manager: ResourceManager,
    gpus_back: Callable[[], int],
) -> None:
    script = str(ROOT / "examples" / "train_job.py")
    small = ["--workers", "1", "--epochs", "2", "--model", "by-keytab"]
    told = last_line(
        alice, ["-m", "hopsgpu.cli.main", "submit", "--deploy-mode", "cluster", script]
    )
    assert "a driver in YARN has no ticket: give --principal and --keytab" in told
    given = keytab_options(realm.keytab("alice"), "alice")
    # Without kinit, in both modes.
    both = ends(
        started(submitting("--deploy-mode", "cluster", *given, script, *small), cluster_env),
        started(
            submitting("--deploy-mode", "client", *given, script, *small), client_env(cluster_env)
        ),
    )
    for code, _, errors in both:
        assert code == 0, errors[-3000:]
    assert manager.application_state(application_in(both[0][2])).has_succeeded
    versions = hopsgpu(alice, "models", "show", "by-keytab")
    assert re.search(r"^version +2$", versions.stdout, re.MULTILINE), versions


NO_TOKENS = """
    import time
    import hopsgpu

    hopsgpu.session("no tokens", conf={
        "spark.executorEnv.HADOOP_TOKEN_FILE_LOCATION": "/nonexistent/tokens",
    })
    began = time.time()
    try:
        hopsgpu.launch(
            lambda: print("trained", flush=True) or time.sleep(600), workers=2, retries=3,
            memory_per_worker="512m", progress="off",
        )
    except hopsgpu.HopsGpuError as error:
        print("failed:", error)
"""


def test_a_gang_that_cannot_write_to_the_lake_fails_before_it_trains(
    alice: Env, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    script = start_script(alice, NO_TOKENS)
    out, errors = script.communicate(timeout=HANG_SECONDS)
    assert "trained" not in out, errors
    assert "this container cannot write to the lake" in out, out + errors
    assert "delegation token" in out or "Kerberos ticket" in out


WEB = """
    import os, sys
    import hopsgpu

    def train():
        (hopsgpu.context().model_dir / "weights").write_text("by web")

    os.environ["HOPSGPU_ROOT"] = root = sys.argv[1]
    store = hopsgpu.ModelStore(f"{root}/models")
    hopsgpu.session("by web")
    result = hopsgpu.launch(
        train, workers=2, model="web", memory_per_worker="512m", progress="off",
    )
    with result.model.open("weights") as file:
        print(result.model.url, file.read())
"""


def test_webhdfs_takes_tickets_in_the_driver_and_tokens_in_ranks(
    alice: Env, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    web = HadoopConf.load_hdfs(alice).get("dfs.namenode.http-address")
    script = start_script(alice, WEB, f"webhdfs://{web}/user/alice/web")
    out, errors = script.communicate(timeout=HANG_SECONDS)
    assert f"webhdfs://{web}/user/alice/web/models/web/1 b'by web'" in out, out + errors
