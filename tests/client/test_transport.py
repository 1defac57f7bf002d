"""Limits on time, what is sent again, TLS, forward proxies and keys, each against a real socket."""

import asyncio
import copy
import datetime
import email.utils
import logging
import pickle
import ssl
import subprocess
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

import rtk
from rtk import RemoteInferenceGenerator, RetryPolicy, Timeouts
from rtk.errors import RequestRejected, ServerFailed, ServerTimeout, ServerUnreachable
from tests.stub import events, serving, text

ONCE = RetryPolicy(tries=1)
QUICK = RetryPolicy(tries=3, wait_s=0.01)
MODELS = text('{"data": []}')


def ask(*answers, url=None, stream=False, **options):
    """What one request brings or raises, the server's stub, and the seconds it took."""

    async def run():
        async with serving(*answers) as stub:
            async with RemoteInferenceGenerator(url or stub.url, **options) as generator:
                begin = time.monotonic()
                try:
                    if stream:
                        outcome = await generator.generate([1], {}, on_chunk=lambda _: None)
                    else:
                        outcome = await generator.request("GET", "/v1/models")
                except Exception as error:
                    outcome = error
                return outcome, stub, time.monotonic() - begin

    return asyncio.run(run())


def silent(seconds=30.0):
    """Takes the request, and answers too late."""

    async def answer(_):
        await asyncio.sleep(seconds)
        return web.json_response({})

    return answer


def stalled():
    """Begins to answer, and goes no further."""

    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": begun\n\n")
        await asyncio.sleep(30)
        return response

    return answer


class TestTimeouts:
    @pytest.mark.parametrize("stream", [False, True])
    def test_first_byte(self, stream):
        error, stub, _ = ask(silent(), stream=stream, timeouts=Timeouts(first_byte_s=0.1), retry=QUICK)
        assert type(error) is ServerTimeout
        assert "did not begin to answer within first_byte_s=0.1 s" in str(error)
        assert len(stub.paths) == 1, "the server may be at work on it, so it is not sent again"

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("answer", [silent, stalled])
    def test_total(self, stream, answer):
        error, stub, _ = ask(answer(), stream=stream, timeouts=Timeouts(total_s=0.2), retry=QUICK)
        assert type(error) is ServerTimeout
        assert "did not answer within total_s=0.2 s" in str(error)
        assert len(stub.paths) == 1

    def test_a_first_byte_in_time_leaves_the_rest_alone(self, vllm_answers):
        body = vllm_answers["streamed"]["text"]
        result, *_ = ask(events(body), stream=True, timeouts=Timeouts(first_byte_s=5.0, total_s=10.0))
        assert result.token_ids == [12, 12, 12]

    def test_connecting_is_tried_again(self):
        """A listener whose queue is full lets nobody in."""

        async def run():
            import socket

            full = socket.socket()
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            waiting = []
            for _ in range(4):
                client = socket.socket()
                client.setblocking(False)
                client.connect_ex(full.getsockname())
                waiting.append(client)
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            limits = Timeouts(connect_s=0.1)
            try:
                async with RemoteInferenceGenerator(url, retry=QUICK, timeouts=limits) as generator:
                    await generator.request("GET", "/v1/models")
            finally:
                for client in [full, *waiting]:
                    client.close()

        with pytest.raises(ServerTimeout, match=r"within connect_s=0.1 s: .* \(sent 3 times in "):
            asyncio.run(run())

    @pytest.mark.parametrize("bad", [0, -1, float("nan")])
    def test_a_limit_is_above_0(self, bad):
        with pytest.raises(ValueError, match="total_s is"):
            Timeouts(total_s=bad)

    def test_connect_does_not_wait_for_a_server_that_never_answers(self, monkeypatch):
        monkeypatch.setattr("rtk.session.connecting._ASK_TIMEOUTS", Timeouts(total_s=0.2))

        async def run():
            async with serving(silent()) as stub:
                await asyncio.to_thread(rtk.connect, stub.url)

        with pytest.raises(ServerTimeout, match="/v1/models did not answer"):
            asyncio.run(run())


def refusing(status, retry_after=None):
    async def answer(_):
        headers = {} if retry_after is None else {"Retry-After": retry_after}
        return web.json_response({"error": {"message": "busy"}}, status=status, headers=headers)

    return answer


class TestRetries:
    @pytest.mark.parametrize("status", [429, 503])
    def test_as_long_as_the_server_asks(self, status):
        outcome, stub, seconds = ask(refusing(status, "1"), MODELS, retry=QUICK)
        assert outcome == {"data": []}
        assert len(stub.paths) == 2
        assert seconds >= 1

    def test_until_the_date_that_the_server_names(self):
        # In whole seconds, so that this is between one and two from now.
        date = email.utils.format_datetime(
            datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2), True
        )
        outcome, _, seconds = ask(refusing(429, date), MODELS, retry=QUICK)
        assert outcome == {"data": []}
        assert seconds >= 0.5

    @pytest.mark.parametrize("value", ["soon", "", "-3", None])
    def test_nonsense_means_the_policys_own_pause(self, value):
        outcome, stub, _ = ask(refusing(429, value), MODELS, retry=QUICK)
        assert outcome == {"data": []}
        assert len(stub.paths) == 2

    def test_too_long_is_said_at_once(self):
        error, stub, _ = ask(refusing(429, "3600"), retry=QUICK)
        assert type(error) is RequestRejected
        assert error.retry_after_s == 3600
        assert len(stub.paths) == 1

    def test_the_statuses_are_the_policys(self):
        policy = RetryPolicy(tries=3, wait_s=0.01, statuses=(500,))
        assert len(ask(refusing(429), retry=policy)[1].paths) == 1
        error, stub, _ = ask(refusing(500), retry=policy)
        assert type(error) is ServerFailed
        assert len(stub.paths) == 3

    def test_at_least_one_try(self):
        with pytest.raises(ValueError, match="at least one try, not 0"):
            RetryPolicy(tries=0)


class TestKeys:
    SECRET = "sk-a-secret"

    @pytest.mark.parametrize("status", [401, 403])
    def test_a_refused_key_is_not_told(self, status, caplog):
        caplog.set_level(logging.DEBUG)
        error, stub, _ = ask(refusing(status), api_key=self.SECRET, retry=QUICK)
        assert stub.headers[0]["Authorization"] == f"Bearer {self.SECRET}"
        assert "api_key=..." in str(error)
        assert self.SECRET not in str(error) + repr(error) + caplog.text

    def test_a_key_is_kept_by_a_copy_and_shown_by_none(self):
        generator = RemoteInferenceGenerator("http://x", api_key=self.SECRET)
        for each in (generator, copy.copy(generator), pickle.loads(pickle.dumps(generator))):
            assert self.SECRET not in repr(each) + repr(each._transport) + str(each)
            assert each._transport.headers == {"Authorization": f"Bearer {self.SECRET}"}

    def test_headers_of_ones_own(self):
        _, stub, _ = ask(MODELS, headers={"X-Team": "moe"}, api_key="k")
        assert (stub.headers[0]["X-Team"], stub.headers[0]["Authorization"]) == ("moe", "Bearer k")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate of localhost and its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
        "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"),
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no openssl command to make a certificate with")
    return folder / "cert.pem", folder / "key.pem"


@asynccontextmanager
async def over_tls(certificate, *, wants_client=False):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    if wants_client:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificate[0])
    app = web.Application()
    app.router.add_get("/v1/models", lambda _: web.json_response({"data": []}))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"https://localhost:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def ask_over_tls(certificate, verify, *, wants_client=False, scheme="https"):
    async def run():
        async with over_tls(certificate, wants_client=wants_client) as url:
            url = url.replace("https", scheme, 1)
            async with RemoteInferenceGenerator(url, verify=verify, retry=QUICK) as generator:
                return await generator.request("GET", "/v1/models")

    return asyncio.run(run())


class TestTls:
    def test_a_certificate_that_nobody_vouches_for_is_refused_at_once(self, certificate):
        with pytest.raises(
            ServerUnreachable, match=r"is not trusted: .*self.signed.*verify='ca.pem'"
        ) as caught:
            ask_over_tls(certificate, True)
        assert "sent" not in str(caught.value)

    @pytest.mark.parametrize("how", [str, lambda path: path, lambda _: False])
    def test_its_own_file_or_no_check_lets_it_through(self, certificate, how):
        assert ask_over_tls(certificate, how(certificate[0])) == {"data": []}

    def test_a_client_certificate(self, certificate):
        context = ssl.create_default_context(cafile=certificate[0])
        with pytest.raises(ServerUnreachable):
            ask_over_tls(certificate, context, wants_client=True)
        context.load_cert_chain(*certificate)
        assert ask_over_tls(certificate, context, wants_client=True) == {"data": []}

    def test_https_to_a_server_without_it(self):
        async def run():
            async with serving(MODELS) as stub:
                url = stub.url.replace("http:", "https:")
                async with RemoteInferenceGenerator(url, retry=QUICK) as generator:
                    await generator.request("GET", "/v1/models")

        with pytest.raises(
            ServerUnreachable, match=r"no TLS with .* A server without TLS has an http:// address"
        ):
            asyncio.run(run())

    def test_a_file_that_holds_no_certificate_is_said_at_once(self, tmp_path):
        (tmp_path / "empty.pem").write_text("nothing")
        for path in (tmp_path / "empty.pem", tmp_path / "none.pem"):
            with pytest.raises(ValueError, match=r"verify='.*' is no file of certificates"):
                RemoteInferenceGenerator("https://x", verify=path)


@asynccontextmanager
async def forward_proxy(seen):
    """Passes on plain requests, and opens tunnels for CONNECT, wherever they are meant for."""

    async def serve(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split("\r\n")[0].split(" ")
        seen.append((method, target))
        port = int(target.rsplit(":", 1)[1].split("/")[0])
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", port)
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            path = "/" + target.split("/", 3)[3]
            upstream.write(head.replace(target, path, 1).encode())

        async def pump(source, sink):
            try:
                while data := await source.read(2**16):
                    sink.write(data)
                    await sink.drain()
            except ConnectionError:
                pass
            sink.close()

        await asyncio.gather(pump(reader, upstream), pump(upstream_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


class TestForwardProxy:
    def through(self, url_of, monkeypatch=None, variables=None, **options):
        async def run():
            seen = []
            async with serving(MODELS) as stub, forward_proxy(seen) as proxy:
                if variables:
                    for name, value in variables.items():
                        monkeypatch.setenv(name, value.format(proxy=proxy))
                else:
                    options["http_proxy"] = proxy
                async with RemoteInferenceGenerator(url_of(stub.url), retry=ONCE, **options) as generator:
                    try:
                        await generator.request("GET", "/v1/models")
                    except ServerUnreachable:
                        assert variables  # the name leads nowhere but through the proxy
                return seen

        return asyncio.run(run())

    def test_named_it_is_used(self):
        (seen,) = self.through(lambda url: url)
        assert seen[0] == "GET"
        assert seen[1].endswith("/v1/models")

    def test_the_environments_is_used_for_other_machines(self, monkeypatch):
        far = lambda url: url.replace("127.0.0.1", "inference.test")  # noqa: E731
        (seen,) = self.through(far, monkeypatch, {"HTTP_PROXY": "{proxy}"})
        assert seen[1].startswith("http://inference.test:")
        assert self.through(far, monkeypatch, {"HTTP_PROXY": "{proxy}", "NO_PROXY": "inference.test"}) == []

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
    def test_and_never_for_this_one(self, monkeypatch, host):
        near = lambda url: url.replace("127.0.0.1", host)  # noqa: E731
        assert self.through(near, monkeypatch, {"HTTP_PROXY": "{proxy}"}) == []

    def test_tls_goes_through_a_tunnel(self, certificate):
        async def run():
            seen = []
            async with over_tls(certificate) as url, forward_proxy(seen) as proxy:
                options = {"verify": certificate[0], "http_proxy": proxy}
                async with RemoteInferenceGenerator(url, **options) as generator:
                    return await generator.request("GET", "/v1/models"), seen, url

        answer, seen, url = asyncio.run(run())
        assert answer == {"data": []}
        assert seen == [("CONNECT", url.removeprefix("https://"))]

    def test_one_that_is_not_there(self):
        error, *_ = ask(MODELS, http_proxy="http://127.0.0.1:9", retry=ONCE)
        assert type(error) is ServerUnreachable
        assert "127.0.0.1:9" in str(error)
