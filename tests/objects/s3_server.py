"""A server with the API of S3, moto's, on a free port: prints its URL, and ends with its input."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


def one_by_one(application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Answer one request after the other: moto's put-if-absent looks first, and then writes."""
    lock = threading.Lock()

    def answer(*request: Any) -> Iterable[bytes]:
        with lock:
            return list(application(*request))

    return answer


def main() -> None:
    application = one_by_one(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
