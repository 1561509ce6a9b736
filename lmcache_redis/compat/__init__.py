# SPDX-License-Identifier: Apache-2.0
"""LMCache's interfaces under their own names: code that was written for them changes its imports.

    original                                     here
    lmcache.v1.multiprocess.custom_types         compat.custom_types
    lmcache.v1.distributed.api                   compat.distributed_api
    lmcache.v1.protocol                          compat.protocol
    lmcache.v1.memory_management (MemoryFormat)  compat.protocol
    lmcache.utils (keys)                         compat.protocol, compat.cache_engine_key
    vllm's lmcache_integration                   compat.multi_process_adapter
    lmcache.storage_backend                      compat.storage_backend
    lmcache.config                               compat.config

Each module is a thin facade over the package. docs/reference/lmcache-names.md lists every
difference.
"""
