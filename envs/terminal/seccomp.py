"""The system calls that a sandboxed command may not make, as a program for the kernel's filter.

Knows call numbers and the filter's byte code; knows no back-end. What is refused are calls that reach past what the
namespaces and limits of a sandbox see: memory that belongs to no process, sockets that no network namespace holds
(such as those between a virtual machine and its host), and doors to the kernel that no task needs.
"""

import errno
import platform
import struct
from collections.abc import Mapping

from envs.terminal.sandbox import SandboxUnavailable

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
_REFUSED: Mapping[str, tuple[int, int]] = {  # numbers on x86_64, aarch64
    "shmget": (29, 194),
    "mq_open": (240, 180),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "memfd_create": (319, 279),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "memfd_secret": (447, 447),
}
_SOCKET = (41, 198)
_FAMILIES = (1, 2, 10, 16)  # unix, IPv4, IPv6, netlink

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little endian
_X32 = 0x40000000


def filter_program(machine: str | None = None) -> bytes:
    """An array of struct sock_filter for `machine` (None: this one). Calls of another architecture are all refused."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise SandboxUnavailable(
            f"no filter for {machine}; the sandbox knows {', '.join(_ARCHITECTURES)}: use Docker()"
        )
    place = list(_ARCHITECTURES).index(machine)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
    ]
    for numbers in _REFUSED.values():
        program += [(_EQUAL, 0, 1, numbers[place]), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
    program += [(_EQUAL, 0, len(_FAMILIES) + 2, _SOCKET[place]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    program += [(_EQUAL, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
    program += [(_RETURN, 0, 0, _REFUSE | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
