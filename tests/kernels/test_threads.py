"""How many threads kernels use by default."""

from __future__ import annotations

import pytest
from support.libraries import need

need("weft._native")

from weft.kernels import native  # noqa: E402


@pytest.mark.parametrize(
    ("groups", "quotas", "cores"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n", "cpu.max": "800000 100000\n"}, 3),
        ("0::/elsewhere\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/../b\n", {"cpu.max": "400000 100000\n"}, 4),
        (
            "3:cpuset:/\n2:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "250000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("1:memory:/a\n", {"a/cpu.max": "100000 100000\n"}, None),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
        ("nonsense\n", {"cpu.max": "100000 100000\n"}, None),
    ],
)
def test_the_least_quota_of_the_cgroups(monkeypatch, tmp_path, groups, quotas, cores):
    (tmp_path / "own").write_text(groups)
    for name, text in quotas.items():
        (tmp_path / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mount" / name).write_text(text)
    monkeypatch.setattr(native, "_OWN_CGROUPS", str(tmp_path / "own"))
    monkeypatch.setattr(native, "_CGROUPS", str(tmp_path / "mount"))
    assert native._quota() == cores


def test_without_cgroups_there_is_no_quota(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_OWN_CGROUPS", str(tmp_path / "none"))
    assert native._quota() is None
