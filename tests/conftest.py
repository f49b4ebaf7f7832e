import pytest
import torch
from hypothesis import settings

from titan_fp8moe.float8 import is_hopper

# Of the tests with random inputs. Chosen by --hypothesis-profile; this is imported before that option is obeyed.
settings.register_profile("ci", max_examples=40, derandomize=True, deadline=None)
# For several processes on one GPU: with OMP_NUM_THREADS=1 and pytest-xdist's "-n 8", some minutes.
settings.register_profile("gpu", max_examples=600, deadline=None, print_blob=True)
settings.register_profile("long", max_examples=10_000, deadline=None, print_blob=True)
settings.load_profile("ci")


def _missing_for_gpu_tests() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    device = torch.device("cuda", torch.cuda.current_device())
    if not is_hopper(device):
        return "{} has compute capability {}.{}, 9.0 is needed".format(
            torch.cuda.get_device_name(device), *torch.cuda.get_device_capability(device)
        )
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if missing := _missing_for_gpu_tests():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f"needs an SM90 GPU: {missing}"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _reset_dynamo():
    yield
    torch.compiler.reset()
