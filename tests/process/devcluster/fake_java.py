"""A `java` that runs as each daemon, of which it has only the answers that `up` asks for.

While a file DIRECTORY/../faults/DAEMON exists, the daemon does what the file says: "die", or "hang"
until the file is removed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from xml.etree import ElementTree

BEANS = {
    "NameNodeStatus": {"State": "active"},
    "FSNamesystemState": {"FSState": "Operational", "NumLiveDataNodes": 1},
    "DataNodeInfo": {"BPServiceActorInfo": json.dumps([{"ActorState": "RUNNING"}])},
}
ADDRESSES = {
    "namenode": ("hdfs-site", "dfs.namenode.http-address"),
    "datanode": ("hdfs-site", "dfs.datanode.http.address"),
    "resourcemanager": ("yarn-site", "yarn.resourcemanager.webapp.address"),
}


def nodes(registered: Path) -> list[dict[str, object]]:
    return [
        {
            "nodeHostName": file.name,
            "state": "RUNNING",
            "lastHealthUpdate": int(time.time() * 1000),
            "totalResource": {
                "resourceInformations": {
                    "resourceInformation": [{"name": "yarn.io/gpu", "value": 1}]
                }
            },
        }
        for file in registered.glob("*")
    ]


def workers(registered: Path) -> list[dict[str, object]]:
    return [
        {
            "host": node["nodeHostName"],
            "state": "ALIVE",
            "lastheartbeat": node["lastHealthUpdate"],
            "resources": {"gpu": {"name": "gpu", "addresses": ["GPU-1"]}},
        }
        for node in nodes(registered)
    ]


def serve(address: str, registered: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "/jmx" in self.path:
                answer: object = {"beans": [BEANS[self.path.rpartition("=")[2]]]}
            elif self.path == "/json/":
                answer = {"status": "ALIVE", "workers": workers(registered)}
            else:
                answer = {"nodes": {"node": nodes(registered)}}
            self.reply(json.dumps(answer).encode())

        def do_PUT(self) -> None:
            self.reply(b"{}")

        def reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    host, _, port = address.rpartition(":")
    HTTPServer((host, int(port)), Handler).serve_forever()


def run_daemon(root: Path, daemon: str) -> None:
    fault = root.parent / "faults" / daemon
    print(f"{daemon} starts", flush=True)
    while fault.exists():
        if fault.read_text() == "die":
            sys.exit("Caused by: the fault of this test")
        time.sleep(0.02)  # only the test knows when the file is removed
    registered = root / "registered"
    registered.mkdir(exist_ok=True)
    if daemon in ADDRESSES:
        site, name = ADDRESSES[daemon]
        file = Path(os.environ["HADOOP_CONF_DIR"], f"{site}.xml")
        properties = {
            p.findtext("name"): p.findtext("value", "")
            for p in ElementTree.parse(file).iter("property")
        }
        serve(properties[name], registered)
    if daemon == "master":
        serve(f"127.0.0.1:{sys.argv[sys.argv.index('--webui-port') + 1]}", registered)
    (registered / daemon).touch()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    if "-version" in sys.argv:
        home = Path(__file__).resolve().parents[1]
        print(f"    java.home = {home}\n    java.specification.version = 17")
    else:
        directory, _, name = os.environ["HOPSGPU_CLUSTER_MEMBER"].rpartition(":")
        if "-format" in sys.argv:
            Path(directory, "hdfs").mkdir()
        else:
            run_daemon(Path(directory), name)
