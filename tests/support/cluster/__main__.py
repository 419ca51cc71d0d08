"""`python -m tests.support.cluster`: a control plane with nodes of the tests, by hand, until Ctrl-C.

The last line that it prints on stdout is `KUBECONFIG=PATH`, once everything is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from tests.support.cluster import control_plane, tools
from tests.support.cluster.api import connected
from tests.support.cluster.node_agent import node_agent


async def main(arguments: argparse.Namespace) -> None:
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    directory: Path = tools.build(sys.stderr)
    with control_plane.running(directory) as plane:
        kubeconfig = plane.certificate_kubeconfig("test-node-agent", ["system:masters"])
        async with (
            connected(kubeconfig) as api,
            node_agent(api, tools.versions()[1], processes=not arguments.simulate) as agent,
        ):
            for _ in range(arguments.nodes):
                await agent.add_node()
            sys.stdout.write(f"logs and audit log: {plane.directory}\nKUBECONFIG={plane.admin_kubeconfig}\n")
            sys.stdout.flush()
            await over.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.support.cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the tests' agent (1)")
    parser.add_argument("--simulate", action="store_true", help="pods are said to run, without any process")
    asyncio.run(main(parser.parse_args()))
