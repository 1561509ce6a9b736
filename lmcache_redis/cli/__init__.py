# SPDX-License-Identifier: Apache-2.0
"""The command line: `lmcache-redis`, also `python -m lmcache_redis.cli`."""

import sys

from lmcache_redis.cli.starting import start_again_if_needed


def main() -> None:
    """Runs the command in `sys.argv`."""
    # First: what is imported before would be imported twice.
    start_again_if_needed(sys.argv[1] if len(sys.argv) > 1 else "")
    from lmcache_redis.cli.app import run

    run()
