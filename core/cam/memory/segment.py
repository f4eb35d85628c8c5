"""A rank's shared memory: an anonymous file (memfd).

It has no name in any file system: nothing shows up in /dev/shm, /dev/shm's size is no limit, and the kernel
frees the pages when the last process that maps them is gone, however it went.
"""

import fcntl
import os
import secrets

NONCE_BYTES = 32

# Of <linux/memfd.h>, Linux 6.3: the file can never be executed. Hosts with vm.memfd_noexec=2 insist on it.
_MFD_NOEXEC_SEAL = 0x0008


class Segment:
    """An open descriptor of shared memory that this rank owns.

    Sparse: a page takes memory once it is touched. The first bytes hold a random number, `nonce`, by which
    a peer finds out that the descriptor it was given is this memory. The size is sealed, so that no peer
    can shrink the file and kill its owner by SIGBUS.
    """

    __slots__ = ("fd", "nonce", "size")

    def __init__(self, name: str, size: int) -> None:
        self.fd = _memfd(f"cam-{name}")
        self.size = size
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            os.pwrite(self.fd, self.nonce, 0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the descriptor; mappings stay. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def doubt(fd: int, nonce: bytes, size: int) -> str:
    """Why the descriptor that a peer handed over is not the segment that it announced; empty when it is."""
    try:
        found = os.pread(fd, NONCE_BYTES, 0)
        length = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        return f"its segment cannot be read: {error}"
    if found != nonce:
        return "its segment holds another number than it announced: the memory is not shared"
    if length != size:
        return f"its segment has {length} bytes, {size} were announced"
    if not seals & fcntl.F_SEAL_SHRINK:
        return "its segment is not sealed against shrinking"
    return ""


def _memfd(name: str) -> int:
    name = name.encode()[:200].decode(errors="ignore")  # the kernel takes 249 bytes
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:  # EINVAL before Linux 6.3
        return os.memfd_create(name, flags)
