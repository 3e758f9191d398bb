"""Where the server listens, and what clients are told about it."""

from __future__ import annotations

import errno
import socket
import sys

from ninfer.errors import OptionError

_BACKLOG = 1024
_LINUX_PROBES = {
    # A dead peer is noticed within about 20 seconds, also by a response that is waiting to be written.
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE"): 10,
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL"): 3,
    (socket.IPPROTO_TCP, "TCP_KEEPCNT"): 3,
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"): 15_000,
}
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; who connects before anything is accepted waits. OptionError says why not."""
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no host name"
        raise OptionError(f"--host {host} is no address of this machine: {reason}") from None
    # Of `localhost` the IPv4 address: all clients try that one.
    family, kind, protocol, _, address = min(known, key=lambda one: one[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # there it would let two servers have the same port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":  # where accepted connections take these over
            for (level, name), value in _LINUX_PROBES.items():
                listener.setsockopt(level, getattr(socket, name), value)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        remedy = ""
        if error.errno == errno.EADDRINUSE:
            remedy = "; choose another --port or stop the program that has it"
        elif error.errno == errno.EACCES:
            remedy = "; choose a --port of 1024 or above"
        reason = error.strerror or error
        raise OptionError(f"cannot listen on {host}, port {port}: {reason}{remedy}") from None
    return listener


def url(host: str, port: int) -> str:
    """The address to give to a client on this machine."""
    host = _ANY.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announcement(base: str, model: str, *, key: bool) -> str:
    """What somebody needs who wants to use the server from a program."""
    said = "the one that the server was started with" if key else "any text; the server asks for none"
    header = ' -H "Authorization: Bearer $NINFER_API_KEY"' if key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return "\n".join(
        [
            "",
            f"  OpenAI clients       base URL {base}/v1   (Chat Completions and Responses)",
            f"  Anthropic clients    base URL {base}   (Messages)",
            f"  model                {model}",
            f"  API key              {said}",
            "",
            f"  curl {base}/v1/chat/completions{header} -H 'Content-Type: application/json' \\",
            f"    -d '{body}'",
            "",
        ]
    )
