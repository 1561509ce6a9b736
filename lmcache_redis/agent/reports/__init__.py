# SPDX-License-Identifier: Apache-2.0
"""What an agent says of itself. Nothing here moves KV.

words        STATUS in words, for `status`, `top` and the page
exported     metrics for Prometheus, and what the `--metrics` address serves beside them
page         the page at `/`, with `charts` of the last hour (`history`)
explaining   why requests missed, and what keeps two layouts apart
watching     what changes in the tiers, for schedulers and their routers
recording    `--record`, for `plan`
"""
