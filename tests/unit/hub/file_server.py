"""One file on the loopback interface, over a line that breaks when told to."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer:
    """Serves `data` under every path but /forbidden/, in ranges; each test turns on the faults it needs."""

    def __init__(self, data):
        self.data = data
        self.ranges = []  # the Range header of each request that was answered
        self.break_after = []  # bytes after which the next answers end, one entry an answer
        self.statuses = []  # statuses of the next answers, which then have no content
        self.ignores_ranges = False
        self.starts_late = 0  # bytes by which a part begins behind where it was asked for
        self.chunked = False
        file_server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.close_connection = True
                if self.path.startswith("/forbidden/"):
                    return self.reply(401, {"Content-Length": "0"}, b"")
                asked = self.headers.get("Range")
                file_server.ranges.append(asked)
                data, size = file_server.data, len(file_server.data)
                if file_server.statuses:
                    return self.reply(file_server.statuses.pop(0), {"Content-Length": "0"}, b"")
                if asked is None or file_server.ignores_ranges:
                    if file_server.chunked:
                        body = b"%x\r\n%s\r\n0\r\n\r\n" % (size, data)
                        return self.reply(200, {"Transfer-Encoding": "chunked"}, body)
                    return self.reply(200, {"Content-Length": str(size)}, data)
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
                if start >= size:
                    return self.reply(416, {"Content-Range": f"bytes */{size}", "Content-Length": "0"}, b"")
                start += file_server.starts_late
                part = {"Content-Range": f"bytes {start}-{size - 1}/{size}"}
                return self.reply(206, part | {"Content-Length": str(size - start)}, data[start:])

            def reply(self, status, headers, content):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if content and file_server.break_after:
                    content = content[: file_server.break_after.pop(0)]
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._server.server_close()
