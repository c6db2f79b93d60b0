"""Odd outputs of nvidia-smi: unusual values of fields, and names of processes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hopsgpu.devcluster.node_gpus import parse_query
from hopsgpu.gpu.node import nvidia_smi as smi
from hopsgpu.gpu.node.devices import DriverError, GpuDevice, GpuProcess, Listing
from hopsgpu.gpu.node.health import BAD, HEALTHY, WATCH
from tests.bounds import HANG_SECONDS
from tests.unit.discovery_standins.node import pythons

RECORDED = (Path(__file__).parent / "answers" / "nvidia_smi_h100_580.xml").read_text()
UUID = "GPU-00000000-1111-2222-3333-444444444444"
BUS = "00000000:00:06.0"
OTHER_UUID, OTHER_BUS = UUID.replace("00000000", "00000001"), BUS.replace("06", "07")
# What drivers have printed in place of a value, and what breaks parsers.
ODD = {
    "unknown": "N/A",
    "error": "[Unknown Error]",
    "short error": "ERR!",
    "forbidden": "[Insufficient Permissions]",
    "empty": "",
    "negative": "-1",
    "huge": "9" * 400,
    "overflow": "18446744073709551615 MiB",
    "superscript": "\N{SUPERSCRIPT TWO}",
    "float": "nan",
    "long": "x" * 100_000,
    "markup": "a & b < c > d &bogus; &#0; ]]> <unknown error> </nothing> <a",
    "controls": "\x00\x01\x1b[2J\n\r\x7f\x85\ufffd",
    "script": "<script>",
}
# The list of processes has tests of its own.
LEAVES = [
    match.start(1)
    for match in re.finditer(r"<([a-z_0-9]+)>[^<>]*</\1>", RECORDED)
    if match.group(1) != "processes"
]
assert len(LEAVES) > 150


def process(name: str, pid: object = os.getpid(), kind: str = "C") -> str:
    return (
        "<process_info>\n\t<gpu_instance_id>N/A</gpu_instance_id>\n"
        f"\t<pid>{pid}</pid>\n\t<type>{kind}</type>\n"
        f"\t<process_name>{name}</process_name>\n\t<used_memory>9 MiB</used_memory>\n"
        "</process_info>\n"
    )


def with_processes(*processes: str) -> str:
    return RECORDED.replace("<processes>", "<processes>" + "".join(processes))


def two_gpus(first: str = RECORDED) -> str:
    begin, end = RECORDED.index("<gpu "), RECORDED.rindex("</nvidia_smi_log>")
    second = RECORDED[begin:end].replace(UUID, OTHER_UUID).replace(BUS, OTHER_BUS)
    last = first.rindex("</nvidia_smi_log>")
    counted = first[:last].replace("<attached_gpus>1", "<attached_gpus>2")
    return counted + second + first[last:]


def each_alone(first: str = RECORDED) -> dict[str, str]:
    """Return what a node of two GPUs prints of each, by its bus id and by its index."""
    second = RECORDED.replace(UUID, OTHER_UUID).replace(BUS, OTHER_BUS)
    return {BUS: first, "0": first, OTHER_BUS: second, "1": second}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Listing]]:
    """Read what nvidia-smi prints: of all GPUs, and of each alone (by its bus id)."""
    printed: dict[str, str] = {}
    failures: dict[str, str] = {"code": "0"}

    def run(command: list[str], seconds: float) -> tuple[int, str, str]:
        if "-i" in command:
            alone = printed.get(command[command.index("-i") + 1])
            return (6, "No devices were found\n", "") if alone is None else (0, alone, "")
        return int(failures["code"]), printed[""], failures.get("err", "")

    def reading(
        out: str,
        alone: dict[str, str] | None = None,
        kernel: tuple[str, ...] = (),
        **failing: str,
    ) -> Listing:
        printed.clear()
        printed.update({"": out} | (alone or {}))
        failures.update(failing)
        monkeypatch.setattr(smi, "bus_ids", lambda: kernel)
        return smi.read({"PATH": str(Path(__file__).parent)}, 60.0)

    monkeypatch.setattr(smi, "run_bounded", run)
    monkeypatch.setattr(smi, "find_nvidia_smi", lambda environ: "nvidia-smi")
    yield reading


def only(listing: Listing) -> GpuDevice:
    (device,) = listing.devices
    return device


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_value_of_any_field_hides_no_gpu(read: Callable[..., Listing], odd: str) -> None:
    for leaf in LEAVES:
        begin = RECORDED.index(">", leaf) + 1
        name = RECORDED[leaf : begin - 1]
        out = RECORDED[:begin] + odd + RECORDED[RECORDED.index("<", begin) :]
        device = only(read(out))
        assert device.address == (f"PCI-{BUS}" if name == "uuid" else UUID), name
        assert 0 <= device.memory_mib <= 2**24, name
        assert len(device.name) <= 200 and device.name.isprintable(), name
        assert device.verdict.state == (BAD if name == "uuid" else HEALTHY), (name, device.verdict)


def test_a_missing_field_hides_no_gpu(read: Callable[..., Listing]) -> None:
    for leaf in LEAVES:
        name = RECORDED[leaf : RECORDED.index(">", leaf)]
        end = RECORDED.index(f"</{name}>", leaf) + len(f"</{name}>")
        device = only(read(RECORDED[: leaf - 1] + RECORDED[end:]))
        assert device.address == (f"PCI-{BUS}" if name == "uuid" else UUID), name


@pytest.mark.parametrize(
    "name",
    [
        "python train.py --opt a&b",
        "bash -c python x.py <in.txt >out.txt 2>&1",
        "\x01\x02python\x1b[2J",
        "python\ufffd\ufffd",
        "python -c print('<a>&b;</a>')",
        "<script>",
        "]]> <!-- <![CDATA[ <?xml",
        "&lol9;",
        "GPU is lost",
        "GPU requires reset",
        "x" * 200_000,
        "a\nUnable to determine the device handle for GPU 0000:07:00.0: Unknown Error",
    ],
)
def test_a_name_of_a_process_hides_no_gpu(read: Callable[..., Listing], name: str) -> None:
    listing = read(two_gpus(with_processes(process(name), process("last"))))
    first, second = listing.devices
    assert (first.address, second.address) == (UUID, OTHER_UUID)
    assert first.verdict.state == second.verdict.state == HEALTHY
    shown, last = first.processes
    assert (shown.pid, last) == (os.getpid(), GpuProcess(os.getpid(), "last"))
    assert shown.name.isprintable() and shown.name[:3] in {name[:3], "\ufffd\ufffdp", "a\ufffdU"}
    assert len(shown.name) <= 200
    assert second.processes == ()


def test_names_that_nvidia_smi_has_escaped(read: Callable[..., Listing]) -> None:
    device = only(read(with_processes(process("a &amp; b &lt;c&gt; &quot;d&quot;"))))
    assert device.processes == (GpuProcess(os.getpid(), 'a & b <c> "d"'),)


@pytest.mark.parametrize(
    "name",
    [
        "</process_name></process_info></processes><performance_state>GPU is lost",
        "</process_name></process_info></processes></gpu></nvidia_smi_log>",
        "</processes></gpu>",
        "<process_info>",
        "</process_info>",
        "<processes>",
        "<mig_mode><current_mig>Enabled</current_mig></mig_mode>",
    ],
)
def test_a_name_that_pretends_to_be_the_end_of_the_list(
    read: Callable[..., Listing], name: str
) -> None:
    listing = read(two_gpus(with_processes(process(name), process("last"))))
    assert [one.address for one in listing.devices] == [UUID, OTHER_UUID]
    assert all(one.verdict.state != BAD for one in listing.devices)
    # No name hides another process.
    assert GpuProcess(os.getpid(), "last") in listing.devices[0].processes
    assert listing.devices[1].processes == ()


@pytest.mark.parametrize(
    "fake",
    [
        f'<gpu id="{OTHER_BUS}"><uuid>GPU-ffff</uuid></gpu>',
        f'<gpu id="{OTHER_BUS}"><uuid>{OTHER_UUID}</uuid><a>GPU is lost</a></gpu>',
        '<gpu id="00000000:09:00.0"><uuid>GPU-ffff</uuid></gpu>',
        '<gpu id="00000000:09:00.0">',
        "<gpu >" * 1000,
    ],
)
@pytest.mark.parametrize("kernel", [(), (BUS, OTHER_BUS)])
def test_a_name_that_pretends_to_be_a_gpu(
    read: Callable[..., Listing], fake: str, kernel: tuple[str, ...]
) -> None:
    """Each GPU is then queried alone: nothing precedes the first GPU of an output."""
    ends = "</process_name></process_info></processes></gpu>"
    hostile = with_processes(process(ends + fake), process("last"))
    listing = read(two_gpus(hostile), each_alone(hostile), kernel)
    assert [one.address for one in listing.devices] == [UUID, OTHER_UUID]
    assert all(one.verdict.state == HEALTHY for one in listing.devices)
    assert not listing.is_isolated
    # The process of the name is not hidden.
    assert listing.devices[0].processes == (GpuProcess(os.getpid(), ""),)


def test_entities_of_a_document_type_are_not_expanded(read: Callable[..., Listing]) -> None:
    entities = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10 if n else "lol"}">' for n in range(10))
    declared = re.sub(r"<!DOCTYPE[^>]*>", f"<!DOCTYPE nvidia_smi_log [{entities}]>", RECORDED)
    odd = declared.replace("NVIDIA H100 80GB HBM3", "&l9;")
    assert only(read(odd)).name == "&l9;"
    inside = RECORDED.replace("<timestamp>", f"<!DOCTYPE a [{entities}]><timestamp>")
    assert only(read(inside.replace("NVIDIA H100 80GB HBM3", "&l9;"))).name == "&l9;"


@pytest.mark.parametrize("where", ["before", "behind", "both", "within"])
def test_warnings_around_the_document(read: Callable[..., Listing], where: str) -> None:
    warning = f"WARNING: infoROM is corrupted at gpu {BUS[4:]} & <more>\n"
    if where == "within":
        warning = warning.replace(">", "")
        out = RECORDED.replace("\t\t<fb_memory_usage>", warning + "\t\t<fb_memory_usage>")
    else:
        out = warning * (where != "behind") + RECORDED + warning * (where != "before")
    device = only(read(out))
    assert (device.address, device.memory_mib) == (UUID, 81559)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.97, 0.999])
def test_an_output_that_is_cut_off(read: Callable[..., Listing], share: float) -> None:
    whole = two_gpus()
    second = whole.index(f'<gpu id="{OTHER_BUS}"')
    out = whole[: second + int(len(whole[second:]) * share)]
    alone = each_alone()
    # nvidia-smi is asked again, for each GPU alone.
    assert [one.address for one in read(out, alone, (BUS, OTHER_BUS)).devices] == [UUID, OTHER_UUID]
    assert [one.address for one in read(out, alone).devices] == [UUID, OTHER_UUID]
    # It is cut off again.
    alone[OTHER_BUS] = alone[OTHER_BUS][: int(len(RECORDED) * 0.5)]
    first, cut = read(out, alone, (BUS, OTHER_BUS)).devices
    assert (first.address, first.verdict.state) == (UUID, HEALTHY)
    assert (cut.address, cut.verdict.state) == (f"PCI-{OTHER_BUS}", BAD)
    assert "incomplete" in cut.verdict.reason


def test_a_list_of_processes_that_is_cut_off(read: Callable[..., Listing]) -> None:
    """The processes of the GPU are unknown, so it is given out after the healthy GPUs."""
    whole = with_processes(process("a"), process("b"))
    cut = whole[: whole.index("<process_name>b")]
    device = only(read(cut, {"0": cut}))
    assert (device.address, device.processes) == (UUID, (GpuProcess(os.getpid(), "a"),))
    assert device.verdict.state == WATCH
    assert "processes" in device.verdict.reason


@pytest.mark.parametrize(
    ("listed", "state"),
    [
        ("", HEALTHY),
        ("N/A", HEALTHY),
        ("None", HEALTHY),
        ("[Unknown Error]", WATCH),
        ("ERR!", WATCH),
        (process("a", pid="ERR!"), WATCH),
        (process("a", pid="[Unknown Error]", kind="C+G"), WATCH),
        (process("a", pid=""), WATCH),
        (process("a", pid=-1), WATCH),
        (process("Xorg", pid="ERR!", kind="G"), HEALTHY),
        # Of another namespace, or none: such pids mean nothing here.
        (process("a", pid=0), HEALTHY),
        (process("a", pid="9" * 30), HEALTHY),
    ],
)
def test_a_list_of_processes_that_cannot_be_read(
    read: Callable[..., Listing], listed: str, state: str
) -> None:
    device = only(read(with_processes(listed)))
    assert (device.address, device.verdict.state, device.processes) == (UUID, state, ())


@pytest.mark.parametrize("kind", ["C", "C+G", "M+C", "[Unknown Error]", ""])
def test_a_process_of_an_unknown_type_may_compute(read: Callable[..., Listing], kind: str) -> None:
    device = only(read(with_processes(process("a", kind=kind))))
    assert device.processes == (GpuProcess(os.getpid(), "a"),)


@pytest.mark.parametrize(
    "out", ["", "\n", "<nvidia_smi_log>", "<nvidia_smi_log>\n<driver_version>580", "\x00\xff" * 99]
)
def test_an_output_without_any_gpu(read: Callable[..., Listing], out: str) -> None:
    with pytest.raises(DriverError, match="exit code 9: .") as error:
        read(out, code="9")
    assert str(error.value).isprintable()


def test_two_gpus_with_one_uuid(read: Callable[..., Listing]) -> None:
    first, second = read(two_gpus().replace(OTHER_UUID, UUID)).devices
    assert (first.address, first.verdict.state) == (UUID, HEALTHY)
    assert (second.address, second.verdict.state) == (f"PCI-{OTHER_BUS}", BAD)
    assert "UUID of another GPU" in second.verdict.reason


@pytest.mark.parametrize("odd", ["N/A", "", "ERR!", "0" * 500, "&<"])
def test_two_gpus_without_bus_ids(read: Callable[..., Listing], odd: str) -> None:
    out = two_gpus().replace(OTHER_BUS, odd).replace(BUS, odd)
    listing = read(out, kernel=(BUS, OTHER_BUS))
    assert [one.address for one in listing.devices] == [UUID, OTHER_UUID]
    assert not listing.is_isolated


def mig(*fields: str) -> str:
    parts = "".join(
        f"<mig_device><index>{n}</index><gpu_instance_id>{n}</gpu_instance_id>"
        f"<compute_instance_id>0</compute_instance_id>{field}"
        "<fb_memory_usage><total>9728 MiB</total></fb_memory_usage></mig_device>"
        for n, field in enumerate(fields)
    )
    return re.sub(
        r"<mig_devices>\s*None\s*</mig_devices>", f"<mig_devices>{parts}</mig_devices>", RECORDED
    ).replace("<current_mig>Disabled", "<current_mig>Enabled")


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_uuid_of_a_mig_device(read: Callable[..., Listing], odd: str) -> None:
    uuid = "MIG-0a1b2c3d-0000-1111-2222-333344445555"
    listing = read(mig(f"<uuid>{uuid}</uuid>", f"<uuid>{odd}</uuid>", ""))
    assert [one.address for one in listing.devices] == [uuid, f"PCI-{BUS}/2", f"PCI-{BUS}/3"]
    assert [one.verdict.state for one in listing.devices] == [HEALTHY, BAD, BAD]


@pytest.mark.parametrize("field", ["index", "gpu_instance_id", "compute_instance_id", "total"])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_odd_values_of_a_mig_device(read: Callable[..., Listing], field: str, odd: str) -> None:
    uuids = [f"MIG-0a1b2c3d-0000-1111-2222-33334444555{n}" for n in range(2)]
    out = mig(*(f"<uuid>{uuid}</uuid>" for uuid in uuids))
    begin = out.index(f"<{field}>", out.index("<mig_device>")) + len(f"<{field}>")
    listing = read(out[:begin] + odd + out[out.index("<", begin) :])
    assert [one.address for one in listing.devices] == uuids
    assert all(one.verdict.state == HEALTHY for one in listing.devices)


def test_a_gpu_with_mig_and_no_mig_device_is_no_isolation(read: Callable[..., Listing]) -> None:
    listing = read(mig(), kernel=(BUS,))
    assert (listing.devices, listing.is_isolated) == ((), False)


def test_the_development_cluster_reads_the_same() -> None:
    listed = parse_query(two_gpus(with_processes(process("a & b <c"))))
    assert [gpu.uuid for gpu in listed] == [UUID, OTHER_UUID]
    for out in ("", RECORDED[:5000]):
        with pytest.raises(ValueError, match="incomplete"):
            parse_query(out)


@pytest.mark.parametrize("version", [one for one in sorted(pythons()) if one == "3.6"])
def test_bytes_on_a_node(tmp_path: Path, version: str) -> None:
    """With the oldest Python of a node, and bytes that are not UTF-8."""
    out = two_gpus(with_processes(process("NAME & <b"))).encode().replace(b"NAME", b"\xff\xfe\x01")
    (tmp_path / "out").write_bytes(out)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat {tmp_path / 'out'}\n")
    tool.chmod(0o755)
    program = (
        "from hopsgpu.gpu.node import nvidia_smi; import os;"
        "print(*(one.address for one in nvidia_smi.read(os.environ, 10).devices))"
    )
    root = Path(smi.__file__).parents[1]
    package = tmp_path / "package" / "hopsgpu" / "gpu"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "node").symlink_to(root / "node")
    ran = subprocess.run(
        [pythons()[version], "-B", "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "package"), "HOPSGPU_NVIDIA_SMI": str(tool)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=True,
    )
    assert ran.stdout.split() == [UUID, OTHER_UUID]
