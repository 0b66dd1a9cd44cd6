# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The Sluice Authors
"""CPython's http.server on a Unix socket. It answers each request with what it understands."""

import base64
import http.server
import socketserver
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __getattr__(self, name):
        if name.startswith("do_"):
            return self.answer
        raise AttributeError(name)

    def body(self):
        # int() takes signs, spaces, underscores and 0x: a lenient reader.
        if "chunked" not in ",".join(self.headers.get_all("Transfer-Encoding", [])).lower():
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        body = b""
        while True:
            size = int(self.rfile.readline().split(b";")[0], 16)
            if size == 0:
                break
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline() not in (b"\r\n", b"\n", b""):
            pass
        return body

    def answer(self):
        parts = [self.command, self.path, self.headers.get("Host", ""), self.body().hex()]
        parts += [name.lower() + "=" + value for name, value in self.headers.items()]
        self.send_response(200)
        self.send_header("X-Seen", base64.b64encode("\1".join(parts).encode("latin-1")).decode())
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


Server(sys.argv[1], Handler).serve_forever()
