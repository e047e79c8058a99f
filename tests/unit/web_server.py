"""A web server on this machine that can be busy, refuse, and break off in the middle of a file."""

import contextlib
import functools
import http.server
import threading


class Server(http.server.SimpleHTTPRequestHandler):
    """A server without ranges, as Python has it, that can be busy and break off."""

    busy = 0
    """How many of the next requests get 503."""
    refusing = False
    """Whether every request gets 403."""
    broken = 0
    """How many of the next files are broken off in the middle."""
    sent = 0
    """Files that were sent, or begun."""

    def send_head(self):
        """Answer, or say that there is no time now."""
        if Server.busy > 0:
            Server.busy -= 1
            self.send_error(503)
            return None
        if Server.refusing:
            self.send_error(403)
            return None
        return super().send_head()

    def copyfile(self, source, outputfile):
        """Send the file, or the first half of it."""
        Server.sent += 1
        data = source.read()
        Server.broken -= 1
        with contextlib.suppress(ConnectionError):
            outputfile.write(data[: len(data) // 2] if Server.broken >= 0 else data)

    def log_message(self, *arguments):
        """Say nothing."""


@contextlib.contextmanager
def serving(folder):
    """Give the URL of a folder behind a `Server`, which does what it is asked for meanwhile."""
    Server.busy = Server.broken = Server.sent = 0
    Server.refusing = False
    handler = functools.partial(Server, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
