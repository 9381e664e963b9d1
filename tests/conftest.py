from __future__ import annotations

import os

from hypothesis import settings

# Tests replace `hcurv.memory.available_bytes` for a while. What imports it by its name must have
# the real one, also if such a test comes first.
import hcurv.inversion.ways
import hcurv.network.choose_root  # noqa: F401

settings.register_profile("default", deadline=None, max_examples=40)
settings.register_profile("ci", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
