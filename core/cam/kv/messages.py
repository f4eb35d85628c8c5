"""What engines say to each other: msgpack, tagged, versioned, bounded. Data from outside: nothing is believed.

    caller                                    host
    Hello(version, who, number)        -->
                                       <--    Challenge(version, engine_id, number, proof)
    Proof(proof)                       -->
                                       <--    Welcome()
    Ask(...), as often as it likes     -->
                                       <--    Answer(...) or Refusal(reason), in order
    Notify, Bye (no answer)            -->

Each side proves that it knows the secret over both sides' random numbers and names.
"""

import hmac
from typing import Any

import msgspec

from cam.kv.geometry import MAX_LAYERS, Geometry

VERSION = 1
#: Bytes of a message; the smaller bound holds until the caller has proven that it knows the secret.
MAX_MESSAGE = 32 << 20
MAX_STRANGER_MESSAGE = 4096
MAX_PAYLOAD = 1 << 20
SECRET_BYTES = 32
NUMBER_BYTES = 32


class Who(msgspec.Struct, array_like=True, frozen=True):
    """An engine, as its peers and their logs name it."""

    engine_id: str
    name: str
    tp_rank: int
    tp_size: int


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base."""


class Hello(Message):
    version: int
    who: Who
    expected: str  # the engine_id that the caller wants to reach; "": whoever is there
    number: bytes


class Challenge(Message):
    version: int
    engine_id: str
    number: bytes
    proof: bytes


class Proof(Message):
    proof: bytes


class Welcome(Message):
    pass


class Refusal(Message):
    reason: str


class AskDescription(Message):
    pass


class AskOffer(Message):
    transport: str
    request: bytes


class AskDigest(Message):
    """The checksums of blocks: what `plan` of these arguments finds at the host, `mine` being the caller's side.

    layers: positions in the host's list of layers.
    """

    mine: Geometry
    layers: list[int]
    first_head: int
    heads: int
    my_blocks: bytes  # int64 little endian
    their_blocks: bytes
    my_start: int
    their_start: int
    tokens: int


class Touch(Message):
    lease: str


class Finish(Message):
    """The caller is through with a lease ("": none); `notify`: tell the host's owner `payload`."""

    lease: str
    payload: bytes
    notify: bool


class Bye(Message):
    pass


class DescriptionAnswer(Message):
    data: bytes


class OfferAnswer(Message):
    blob: bytes
    fds: int


class DigestAnswer(Message):
    digests: list[int]


class LeaseAnswer(Message):
    alive: bool
    reason: str


FromCaller = Hello | Proof | AskDescription | AskOffer | AskDigest | Touch | Finish | Bye
FromHost = Challenge | Welcome | Refusal | DescriptionAnswer | OfferAnswer | DigestAnswer | LeaseAnswer

encode = msgspec.msgpack.Encoder().encode
decode_from_caller = msgspec.msgpack.Decoder(FromCaller).decode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode


class LayerEntry(msgspec.Struct, array_like=True, frozen=True):
    name: str
    geometry: int
    address: int


class Description(msgspec.Struct, array_like=True, frozen=True):
    """An engine for its peers: who it is, where its agent listens, how its layers lie.

    boot_id, socket: of this host and of the agent's Unix socket there. host, port: its TCP address; "" and 0
    when it listens on none. secret: empty when both sides have been given one.
    """

    version: int
    who: Who
    boot_id: str
    socket: bytes
    host: str
    port: int
    secret: bytes
    geometries: list[Geometry]
    layers: list[LayerEntry]

    def checked(self) -> "Description":
        """Raises ValueError."""
        if len(self.layers) > MAX_LAYERS or len({layer.name for layer in self.layers}) != len(self.layers):
            raise ValueError(f"layers must be at most {MAX_LAYERS}, with different names")
        for layer in self.layers:
            if not 0 <= layer.geometry < len(self.geometries):
                raise ValueError(f"layer {layer.name!r} has geometry {layer.geometry} of {len(self.geometries)}")
            if not 0 < layer.address < 1 << 63:
                raise ValueError(f"layer {layer.name!r} lies at {layer.address}")
        return self


encode_description = msgspec.msgpack.Encoder().encode
_decode_description = msgspec.msgpack.Decoder(Description).decode


def read_description(data: bytes) -> Description:
    """Raises ValueError that says what is wrong."""
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"a description has at most {MAX_MESSAGE} bytes, got {len(data)}")
    try:
        version: Any = msgspec.msgpack.decode(data)[0]
        if version == VERSION:
            return _decode_description(data).checked()
    except (msgspec.MsgspecError, LookupError, TypeError) as error:
        raise ValueError(f"not a description of an engine: {error}") from None
    raise ValueError(f"the description has version {version}, this CAM understands {VERSION}")


def proof(secret: bytes, role: bytes, hello: Hello, engine_id: str, number: bytes) -> bytes:
    """What `role` (b"host" or b"caller") must know to compute. Lengths are bounded, so the text is unambiguous."""
    parts = [role, hello.who.engine_id.encode(), engine_id.encode(), hello.number, number]
    text = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(secret, text, "sha256")
