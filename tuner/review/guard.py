"""Who may ask the dashboard: a token made at each start, one cookie, this machine's own pages.

The server can start processes, so each of these is refused, before a route is looked for:

- a Host that is not this machine's (DNS rebinding);
- a request that another page made, also one of another port of this machine (`Sec-Fetch-Site`,
  `Origin`): cookies know no ports, and SameSite lets `localhost:1` speak to `localhost:2`;
- a request without the cookie, which only the token in the printed address gives;
- a POST without the page's own key in a header, or without a sign of where it came from.

Every answer forbids framing, sniffing, other origins' content and inline scripts.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard"]

KEY_HEADER = "x-tune-key"
HOSTS = ("127.0.0.1", "localhost", "[::1]")
MAX_BODY_BYTES = 64_000  # of a POST: a form of a few words

# Styles are inline since Plotly writes them so; scripts never are.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware around the whole application.

    Args:
        app: what is guarded.
        token: what the printed address holds.
        port: of the server; it names the cookie, since two servers share one machine's cookies.
    """

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._cookie = f"tune-dashboard-{port}"
        self._cookie_value = secrets.token_urlsafe(32)
        digest = hmac.new(self._cookie_value.encode(), b"key of the pages", hashlib.sha256)
        self.key = digest.hexdigest()  # what pages send with a POST

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no websockets here
            return

        async def hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, hardened)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return what is answered in the application's place; None where it may be asked."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or _without_port(hosts[0]) not in HOSTS:
            return _refused("the Host is not this machine; open the address that was printed")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _refused("another page asked; paste the address into the browser's own line")
        if headers.get("origin", f"http://{hosts[0]}") != f"http://{hosts[0]}":
            return _refused("another page asked")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("only GET, HEAD and POST are answered\n", 405)
        if scope["method"] == "GET" and (entry := self._entry(scope)):
            return entry
        if not _equal(_cookies(headers).get(self._cookie, ""), self._cookie_value):
            return _refused("no valid token; open the address that `tune dashboard` printed")
        return self._post_refusal(headers) if scope["method"] == "POST" else None

    def _entry(self, scope: Scope) -> Response | None:
        """Give the cookie for the right token, and take the token out of the address."""
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if not any(name == "token" for name, _ in pairs):
            return None
        if not all(_equal(value, self._token) for name, value in pairs if name == "token"):
            return _refused("a wrong token; open the address that `tune dashboard` printed")
        rest = urlencode([(name, value) for name, value in pairs if name != "token"])
        path = "/" + scope["path"].lstrip("/\\")  # never another host's
        answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
        answer.set_cookie(self._cookie, self._cookie_value, httponly=True, samesite="strict")
        return answer

    def _post_refusal(self, headers: Headers) -> Response | None:
        if "origin" not in headers and "sec-fetch-site" not in headers:
            return _refused("it does not say which page asked")
        if not _equal(headers.get(KEY_HEADER, ""), self.key):
            return _refused("the page's key is missing or old; load the page again")
        length = headers.get("content-length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return PlainTextResponse(f"at most {MAX_BODY_BYTES} bytes, of a stated length\n", 413)
        return None


def _refused(why: str) -> Response:
    return PlainTextResponse(f"refused: {why}\n", 403)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdigit() else host.lower()


def _cookies(headers: Headers) -> Mapping[str, str]:
    try:
        found = SimpleCookie("; ".join(headers.getlist("cookie")))
    except CookieError:
        return {}
    return {name: morsel.value for name, morsel in found.items()}


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())
