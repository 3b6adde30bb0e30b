"""Builds the site with the cell catalog into `site/` and serves it on this machine."""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import subprocess
import sys
from pathlib import Path

import needs

ROOT = Path(__file__).resolve().parent.parent


def build(site: Path = ROOT / "site") -> int:
    """Builds the site, strictly; returns the exit status. The formulas need Node.js and KaTeX."""
    problem = needs.lacking("node")
    if problem:
        print(f"catalog: {problem}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = dict(os.environ, NO_MKDOCS_2_WARNING="1")
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Says nothing about each request."""


def serve(site: Path, port: int) -> int:
    handler = functools.partial(Handler, directory=str(site))
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        print(
            f"catalog: cannot serve on port {port} ({error.strerror}); choose another one: "
            "make catalog PORT=8001",
            file=sys.stderr,
        )
        return 1
    with server:
        print(f"\nThe cell catalog: http://127.0.0.1:{server.server_port}/catalog.html", flush=True)
        print("Stop with Ctrl-C. The same pages open without a server: site/index.html", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="0 takes any free port")
    parser.add_argument("--once", action="store_true", help="only build")
    options = parser.parse_args()
    status = build()
    if status or options.once:
        return status
    return serve(ROOT / "site", options.port)


if __name__ == "__main__":
    sys.exit(main())
