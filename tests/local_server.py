"""A server of HTTP in this process, whose threads end with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Quiet:
    """For handlers of requests: what they answer, and nothing on the terminal."""

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def send(self, status: int, content: bytes, **headers: str) -> None:
        """Answer with a body, and headers whose names have `_` for `-`."""
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    # They are waited for: a thread that computes while the interpreter ends aborts the process.
    server.daemon_threads = False
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
