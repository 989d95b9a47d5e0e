from __future__ import annotations

import sys

from benchmarks import report


def main() -> None:
    stale = [page for page in report.pages() if report.rendered(page) != page.read_text()]
    if "--check" in sys.argv:
        names = ", ".join(page.name for page in stale)
        sys.exit(f"not what the recorded runs say: {names}. Run python -m benchmarks.report" if stale else 0)
    for page in stale:
        page.write_text(report.rendered(page))


if __name__ == "__main__":
    main()
