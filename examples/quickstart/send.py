"""Send jobs and wait for their results."""

from __future__ import annotations

from tasks import add, greet

total = add.delay(2, 3)
print(f"sent job {total.id}")
print("2 + 3 =", total.get(timeout=30))

later = add.apply_async((20, 22), countdown=1)
print("state of the delayed job:", later.state)
print("20 + 22 =", later.get(timeout=30))

for greeting in [greet.delay(name) for name in ("Ada", "Grace", "Barbara")]:
    print(greeting.get(timeout=30))
