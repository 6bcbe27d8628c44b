"""A player behind an OpenAI-compatible server: several requests at once, patient with limits and faults, discreet with keys.

What concerns one request (a provider's refusal, a fault that outlasts the retries) is that reply's ``error``; what every
request would meet (a wrong key, no credit, an unknown model) stops the run with a :class:`KlbError`.
"""

from __future__ import annotations

import email.utils
import hashlib
import json
import math
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from typing import Any
from urllib.parse import urlsplit

import openai
from pydantic import BaseModel, ValidationError

from klb_probe.dialogue.json_text import whole
from klb_probe.dialogue.player import Reply, Request
from klb_probe.errors import KlbError

_KEYS = ("KLB_API_KEY", "OPENAI_API_KEY")
_BASE_URLS = ("KLB_BASE_URL", "OPENAI_BASE_URL")
_SPEC = re.compile(r"endpoint:(?P<model>.+?)(?:@(?P<base_url>https?://.*))?")
_NO_SCHEME = re.compile(r"@(localhost\b|[\w.-]+:\d+(/|$))")

_TRIED_AGAIN = (408, 409, 429)  # and every 5xx
_STOPS_THE_RUN = {
    401: "check the key in KLB_API_KEY or OPENAI_API_KEY",
    402: "the account has no credit left",
    403: "the key may not use this model",
    404: "check the model's name and the base URL",
}
_UNSUPPORTED = re.compile(
    r"unsupported|n[o']t support|unknown|unrecognized|unexpected|extra inputs|not permitted|not allowed|deprecated|"
    r"not compatible|incompatible",
    re.IGNORECASE,
)
_LONGEST_BACKOFF = 60.0  # seconds
_LONGEST_RETRY_AFTER = 300.0  # seconds; a server that asks for more (a daily quota) is not waited for
_LONGEST_WORDS = 300  # characters of a server's message that are passed on
_SHORTEST_SECRET = 8  # characters; shorter keys are placeholders for local servers, and ordinary words hold them


class _ChatMessage(BaseModel):
    content: str | None = None
    refusal: str | None = None


class _Choice(BaseModel):
    message: _ChatMessage
    finish_reason: str | None = None


class _TokenCounts(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Completion(BaseModel):
    choices: list[_Choice] | None = None
    usage: _TokenCounts | None = None
    error: Any = None


class _TryAgain(Exception):
    """A try failed in a way that may pass.

    Attributes:
        retry_after: Seconds that the server asks to wait; 0 if it does not say.
        for_all: Whether the other requests should wait too.
    """

    def __init__(self, what: str, *, retry_after: float = 0.0, for_all: bool = False) -> None:
        super().__init__(what)
        self.retry_after = retry_after
        self.for_all = for_all


class _Unsupported(Exception):
    """The server does not know what was sent.

    Attributes:
        what: The parameter, or the kind of response format.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class _Pause:
    """A moment before which no thread sends anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0

    def extend(self, seconds: float) -> None:
        """Nobody sends for so long from now."""
        with self._lock:
            self._until = max(self._until, time.monotonic() + seconds)

    def wait(self, stop: threading.Event) -> None:
        """Wait until the pause is over, however often it is extended, or until ``stop``."""
        while (left := self._until - time.monotonic()) > 0 and not stop.wait(left):
            pass


class EndpointPlayer:
    """A model behind an OpenAI-compatible server. One :meth:`reply` at a time.

    Parameters that the server calls unsupported are left out from then on: ``max_tokens`` (``max_completion_tokens``
    instead), ``temperature``, ``seed``, and the response format (a JSON object instead of a schema, then none).

    Args:
        model: As the server names it.
        base_url: Such as ``http://localhost:8000/v1``; None is the client's default. It may not hold credentials or a query.
        api_key: Any value for a server without authentication.
        max_in_flight: Most requests at once.
        timeout: Seconds without a byte after which a try has failed.
        retries: Tries after the first.
        json_mode: Hold requests that have a schema to it.
        seed: The same seed, stream and place in the stream give the same seed of a request.
        backoff: Seconds, at most, before the first retry; doubled for each one after it. Retry-After only lengthens it.

    Raises:
        KlbError: A key or base URL that cannot be used, or no request at once.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None,
        api_key: str,
        max_in_flight: int = 8,
        timeout: float = 120.0,
        retries: int = 6,
        json_mode: bool = False,
        seed: int = 0,
        backoff: float = 1.0,
    ) -> None:
        if not re.fullmatch(r"[!-~]+", api_key):  # the client would quote it in an exception
            raise KlbError(f"the key for {model} is empty or holds spaces or characters that no key has: set {_KEYS[0]} anew")
        if max_in_flight < 1:
            raise KlbError(f"max_in_flight {max_in_flight} for {model}: at least one request has to be under way")
        self.model = model
        self.name = f"endpoint:{model}"
        self.max_in_flight = max_in_flight
        self.timeout = timeout
        self.retries = retries
        self.json_mode = json_mode
        self.seed = seed
        self.backoff = backoff
        if base_url is not None:
            _check_url(base_url)
        self._client = openai.OpenAI(api_key=api_key, base_url=base_url, timeout=timeout, max_retries=0)
        self.base_url = str(self._client.base_url).rstrip("/")
        _check_url(self.base_url)
        self._pause = _Pause()
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._unsupported: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"EndpointPlayer({self.model!r}, base_url={self.base_url!r})"

    def record(self) -> dict[str, Any]:
        """Model, base URL and settings; never a key. ``unsupported`` is what the server has turned down so far."""
        return {
            "kind": "endpoint",
            "model": self.model,
            "base_url": self.base_url,
            "seed": self.seed,
            "json_mode": self.json_mode,
            "max_in_flight": self.max_in_flight,
            "timeout": self.timeout,
            "retries": self.retries,
            "unsupported": sorted(self._unsupported),
        }

    def forget(self, conversation: str) -> None:
        """Nothing is kept."""

    def reply(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order.

        Raises:
            KlbError: The server turned down what all requests share: key, credit, model or address.
        """
        if not requests:
            return []
        jobs = [(request, self._seed_of(request)) for request in requests]
        stop = threading.Event()
        # The pool's threads are daemons, and leaving the block does not wait for them: an interrupt ends at once.
        with ThreadPool(min(self.max_in_flight, len(jobs))) as pool:
            try:
                return list(pool.imap(lambda job: self._answer(*job, stop), jobs))
            finally:
                stop.set()

    def _seed_of(self, request: Request) -> int:
        """31 bits that servers of every kind take as a seed."""
        number = self._asked[request.stream]
        self._asked[request.stream] += 1
        digest = hashlib.sha256(json.dumps([self.seed, request.stream, number]).encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    def _answer(self, request: Request, seed: int, stop: threading.Event) -> Reply:
        """The reply to a request after as many tries as it takes and may take."""
        tries = 0
        while True:
            self._pause.wait(stop)
            if stop.is_set():
                return Reply("", error="stopped")
            tries += 1
            try:
                return self._try(request, seed)
            except _TryAgain as failure:
                what, retry_after, for_all = str(failure), failure.retry_after, failure.for_all
            except BaseException:
                stop.set()
                raise
            if retry_after > _LONGEST_RETRY_AFTER:
                return Reply("", error=f"{what}; the provider asks to wait {retry_after:.0f} s")
            if tries > self.retries:
                return Reply("", error=f"{what} (tried {tries} times)")
            backoff = min(self.backoff * 2 ** (tries - 1), _LONGEST_BACKOFF) * random.uniform(0.5, 1.0)
            wait = max(backoff, retry_after)
            if for_all:
                self._pause.extend(wait)
            else:
                stop.wait(wait)

    def _try(self, request: Request, seed: int) -> Reply:
        """One try, made again at once without whatever turns out to be unsupported."""
        unsupported = self._unsupported
        while True:
            try:
                reply = self._send(request, seed, unsupported)
            except _Unsupported as found:
                unsupported |= {found.what}
                continue
            if reply.error is None:
                with self._lock:
                    self._unsupported |= unsupported
            return reply

    def _send(self, request: Request, seed: int, unsupported: frozenset[str]) -> Reply:
        parameters = self._parameters(request, seed, unsupported)
        messages: list[Any] = [{"role": message.role, "content": whole(message.content)} for message in request.messages]
        fatal = ""
        try:
            answer = self._client.chat.completions.with_raw_response.create(
                model=self.model, messages=messages, **parameters
            ).http_response
        except openai.APITimeoutError:
            raise _TryAgain(f"no answer within {self.timeout:g} s") from None
        except openai.APIConnectionError as error:
            raise _TryAgain(self._line(f"connection failed: {error.__cause__ or error}")) from None
        except openai.APIStatusError as error:
            status, words = error.status_code, self._line(_words(error.body) or error.response.reason_phrase)
            if status in _TRIED_AGAIN or status >= 500:
                retry_after = _retry_after(error.response.headers.get("retry-after", ""))
                what = f"the provider answered {status}: {words}"
                raise _TryAgain(what, retry_after=retry_after, for_all=status == 429 or retry_after > 0) from None
            if status in (400, 422) and (part := _unsupported_part(error, parameters)):
                raise _Unsupported(part) from None
            if status not in _STOPS_THE_RUN or _is_moderation(error.body):
                return Reply("", error=f"refused by the provider: {words}")
            fatal = f"{self.model} at {self.base_url} answered {status}: {words}; {_STOPS_THE_RUN[status]}"
        if fatal:  # raised here, so that it has no context with the client's headers in it
            raise KlbError(fatal)
        return self._read(answer.text)

    def _parameters(self, request: Request, seed: int, unsupported: frozenset[str]) -> dict[str, Any]:
        """What is sent beside the messages: all of it but what is unsupported."""
        limit = "max_completion_tokens" if "max_tokens" in unsupported else "max_tokens"
        parameters: dict[str, Any] = {"temperature": request.temperature, limit: request.max_tokens, "seed": seed}
        if self.json_mode and request.schema is not None:
            if "json_schema" not in unsupported:
                named = {"name": request.part, "schema": request.schema, "strict": True}
                parameters["response_format"] = {"type": "json_schema", "json_schema": named}
            elif "json_object" not in unsupported:
                parameters["response_format"] = {"type": "json_object"}
        return {name: value for name, value in parameters.items() if name not in unsupported}

    def _read(self, body: str) -> Reply:
        """The reply in the body of an answer."""
        try:
            completion = _Completion.model_validate_json(body)
        except ValidationError:
            raise _TryAgain(self._line(f"the provider's answer is no completion: {body or 'it is empty'}")) from None
        if not completion.choices:
            raise _TryAgain(self._line(f"the provider's answer has no choices {_words(completion.error)}"))
        choice, usage = completion.choices[0], completion.usage or _TokenCounts()
        tokens: dict[str, Any] = {"prompt_tokens": usage.prompt_tokens or 0, "completion_tokens": usage.completion_tokens or 0}
        if choice.message.refusal or choice.finish_reason == "content_filter":
            words = self._line(choice.message.refusal or "content_filter")
            return Reply("", error=f"refused by the provider: {words}", **tokens)
        if choice.message.content is None:
            raise _TryAgain(f"the provider's answer has no content (finish reason {choice.finish_reason})")
        return Reply(self._scrub(choice.message.content), **tokens)

    def _line(self, text: str) -> str:
        """Foreign words as one short line without the key."""
        line = " ".join(self._scrub(text).split())
        return line if len(line) <= _LONGEST_WORDS else line[:_LONGEST_WORDS] + "…"

    def _scrub(self, text: str) -> str:
        key = self._client.api_key
        return text.replace(key, "[key]") if len(key) >= _SHORTEST_SECRET else text


def open_endpoint(spec: str, *, json_mode: bool = False, seed: int = 0) -> EndpointPlayer:
    """The player that ``endpoint:MODEL`` or ``endpoint:MODEL@BASE_URL`` names.

    The key comes from ``KLB_API_KEY``, else ``OPENAI_API_KEY``; the base URL from the spec, else ``KLB_BASE_URL``,
    ``OPENAI_BASE_URL``, else it is the client's default.

    Raises:
        KlbError: A spec that is none, no key, or one that cannot be used.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise KlbError(f"{spec}: an endpoint is endpoint:MODEL or endpoint:MODEL@http://HOST/v1")
    model, base_url = match["model"], match["base_url"] or _from_environment(_BASE_URLS)
    if _NO_SCHEME.search(model):
        raise KlbError(f"{spec}: the base URL has to start with http:// or https://")
    key = _from_environment(_KEYS)
    if key is None:
        raise KlbError(
            f"no key for endpoint:{model}: set {_KEYS[0]} (or {_KEYS[1]}); any value for a local server without authentication"
        )
    return EndpointPlayer(model, base_url=base_url, api_key=key, json_mode=json_mode, seed=seed)


def _from_environment(names: Sequence[str]) -> str | None:
    """The first of the variables that is set and not blank."""
    return next((value for name in names if (value := os.environ.get(name, "").strip())), None)


def _check_url(url: str) -> None:
    """Refuse, without quoting it, what is no URL or holds secrets that logs and records would show."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise KlbError("the base URL of the endpoint is not of the form http://HOST:PORT/PATH")
    if parts.username is not None or parts.query or parts.fragment:
        raise KlbError(f"the base URL of {parts.hostname} may not hold credentials or a query: put the key into {_KEYS[0]}")


def _words(body: object) -> str:
    """What an error's body says."""
    if isinstance(body, dict):
        message = body.get("message")
        return message if isinstance(message, str) and message else json.dumps(body, ensure_ascii=False)
    return "" if body is None else str(body)


def _retry_after(header: str) -> float:
    """Seconds that a Retry-After header asks for, written as a number or a date; 0 if it says nothing of use."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _is_moderation(body: object) -> bool:
    """Whether an error that looks like a missing permission is about what was said (OpenRouter answers so, with 403)."""
    if not isinstance(body, dict):
        return False
    metadata = body.get("metadata")
    return body.get("code") == "content_policy_violation" or (isinstance(metadata, dict) and "flagged_input" in metadata)


def _unsupported_part(error: openai.APIStatusError, parameters: dict[str, Any]) -> str | None:
    """Which of the parameters the server says it does not support, or None if the error is about something else."""
    words = _words(error.body)
    optional: list[str] = [name for name in ("max_tokens", "temperature", "seed", "response_format") if name in parameters]
    places = {name: match.start() for name in optional if (match := re.search(rf"\b{name}\b", words))}
    named = str(error.param or "").split(".")[0]
    name = named if named in optional else min(places, key=lambda one: places[one], default="")
    if name == "response_format":  # whatever is wrong with it, a simpler one may do
        return parameters[name]["type"]
    return name if name and _UNSUPPORTED.search(words) else None
