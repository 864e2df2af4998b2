"""CUDA devices of a machine, from its driver's folder."""

from pathlib import Path

import pytest

from trimtab_pipelines.devices import visible_devices


@pytest.mark.parametrize(
    ("environment", "devices"),
    [({}, ("0", "1")), ({"CUDA_VISIBLE_DEVICES": "1, GPU-5"}, ("1", "GPU-5"))]
    + [({"CUDA_VISIBLE_DEVICES": hidden}, ()) for hidden in ("", "-1", "-1,0")],
)
def test_devices_are_the_drivers_unless_some_are_listed(environment, devices, tmp_path: Path):
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)

    assert visible_devices(environment, tmp_path) == devices


def test_machine_without_a_driver_has_no_devices(tmp_path: Path):
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == ()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert visible_devices({}, tmp_path) == ("0",)
