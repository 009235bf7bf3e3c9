"""Try to connect to every HOST:PORT of $ADDRESSES; exit with code 0 only if a network policy drops each attempt."""

import os
import socket
import sys

TIMEOUT_S = float(os.environ.get("TIMEOUT_S", "5"))


def fault(address: str) -> str:
    """Return the reason why an address counts as unprotected; empty if the attempt to connect was dropped."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S):
            return "a stranger is let in: network policies are not enforced"
    except TimeoutError:
        return ""
    except ConnectionRefusedError:  # the packet came to the pod, where no server listens yet
        return "the pod refuses, where a policy would drop: network policies are not enforced"
    except OSError as exc:
        return f"nothing was tried: {exc}"


faults = {address: fault(address) for address in os.environ["ADDRESSES"].split()}
for address, found in faults.items():
    print(f"{address}: {found or 'dropped'}")
sys.exit(any(faults.values()))
