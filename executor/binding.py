"""What makes a pod a sandbox's, whichever way the call came in."""

from __future__ import annotations

from executor.errors import InvalidRequest
from executor.lease import Lease
from executor.processes import Processes
from executor.wire import BindRequest, bad_env


def bind(lease: Lease, processes: Processes, request: BindRequest) -> bool:
    """True where the pod became this sandbox's now; its files are still to be written. False where it was already.

    Raises InvalidRequest, Conflict for another's."""
    if not request.sandbox_id:
        raise InvalidRequest("sandbox_id is empty", field="sandbox_id")
    for name in ("env", "secrets"):
        what = bad_env(getattr(request, name))
        if what is not None:
            raise InvalidRequest(f"{name} {what}", field=name)
    if not lease.bind(request):
        return False
    processes.bind_env(request.env | request.secrets)
    return True
