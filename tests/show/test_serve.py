"""The page on the loopback address: what it answers, and that the command ends."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading

import pytest

from tests.show.helpers import simulated
from weft.base.errors import InputError
from weft.cli.main import main
from weft.plan.plan import save_plan
from weft.show.page import ADDRESS, PageServer

TEXT = "<!doctype html><p>\u00d7</p>"


@pytest.fixture
def server():
    with PageServer(TEXT) as opened:
        thread = threading.Thread(target=opened.serve_forever, daemon=True)
        thread.start()
        yield opened
        opened.shutdown()
        thread.join(timeout=10)
        assert not thread.is_alive()


def ask(address: str, path: str = "/", *, method: str = "GET", host: str | None = None):
    port = int(address.rstrip("/").rpartition(":")[2])
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=10)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_the_page_is_there_and_is_html(server):
    status, headers, body = ask(server.address)
    assert (status, body.decode()) == (200, TEXT)
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    status, headers, body = ask(server.address, method="HEAD")
    assert (status, body, headers["Content-Length"]) == (200, b"", str(len(TEXT.encode())))


@pytest.mark.parametrize("path", ["/index.html", "/../etc/passwd", "/?x=1", "/weft", "/%2e%2e/", "*"])
def test_nothing_else_is_there(server, path):
    status, _, body = ask(server.address, path)
    assert status == 404
    assert body == b""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent(server, method):
    assert ask(server.address, method=method)[0] == 501


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1", "localhost:1", "127.0.0.1.example.org:80", ""])
def test_other_names_for_this_machine_get_nothing(server, host):
    status, _, body = ask(server.address, host=host)
    assert (status, body) == (403, b"")


def test_localhost_is_a_name_for_this_machine(server):
    assert ask(server.address, host=f"localhost:{server.address.rstrip('/').rpartition(':')[2]}")[0] == 200


def test_only_the_loopback_address_listens(server):
    port = int(server.address.rstrip("/").rpartition(":")[2])
    with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_a_port_that_is_taken_or_does_not_exist_is_refused(server):
    port = int(server.address.rstrip("/").rpartition(":")[2])
    with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{port}: .*--port"):
        PageServer(TEXT, port=port)
    with pytest.raises(InputError, match="port 70000 does not exist"):
        PageServer(TEXT, port=70000)


def test_the_command_says_where_and_ends_with_ctrl_c(tmp_path):
    model, plan = tmp_path / "net.json", tmp_path / "plan.json"
    model.write_text(json.dumps({
        "format": "weft.graph", "version": 1,
        "ops": [{"name": name, "kind": "matmul", "times": {"RTX3090": 1e-3}} for name in "ab"],
        "edges": [{"from": "a", "to": "b", "bytes": 4096}]}))
    assert main(["plan", str(model), "2 x RTX3090", "--batch", "4", "--microbatches", "4", "--strategy", "gpipe",
                 "--mode", "inference", "-q", "--out", str(plan)]) == 0
    process = subprocess.Popen([sys.executable, "-m", "weft", "view", str(plan), "--model", str(model), "--no-open"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(90, process.kill)
    timer.start()
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), process.stderr.read()
        status, _, body = ask(address)
        assert status == 200
        assert "on 2 devices" in body.decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        timer.cancel()
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()
        process.stderr.close()


def test_a_plan_that_is_not_there_is_bad_input(tmp_path, capsys):
    assert main(["view", str(tmp_path / "none.json"), "--no-open"]) == 2
    assert "none.json" in capsys.readouterr().err
    save_plan(simulated().program.plan, tmp_path / "chain.json")
    assert main(["view", str(tmp_path / "chain.json"), "--no-open"]) == 2
    assert "--model" in capsys.readouterr().err
