# SPDX-License-Identifier: Apache-2.0
"""Examples may take their time: the machine may be shared, and no test here is about speed."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
