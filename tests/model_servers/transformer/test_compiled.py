"""Compiled forms: made in a process of their own, kept beside weights, served as the point that names them."""

import shutil
import subprocess
import sys
import zipfile

import pytest
import torch

from tests.model_servers.transformer.test_family import SHAPE, TASKS, answers, images, spec
from trimtab_model_servers.compile_worker import CompileRequest, CompileResult
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_model_servers.transformer import compiled
from trimtab_model_servers.transformer.checkpoints import Checkpoint, load, save
from trimtab_model_servers.transformer.compiled import SUFFIX, compile_form, instructions, load_form
from trimtab_model_servers.transformer.tasks import Head
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer

PLAIN = {"name": "plain", "accuracy": 0.8, "tokenDelta": -4}
needs_compiler = pytest.mark.skipif(bool(compiled.compiler_problem()), reason=compiled.compiler_problem())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights, and beside them a form of theirs that merges four tokens in each layer."""
    torch.manual_seed(5)
    transformer = VisionTransformer(SHAPE).eval().requires_grad_(requires_grad=False)
    heads = {task: Head(torch.randn(len(labels), 16), torch.randn(len(labels))) for task, labels in TASKS.items()}
    found = tmp_path_factory.mktemp("compiled")
    save(Checkpoint(transformer, {"plain": heads}, TASKS, "Image"), found / "small.safetensors", {"seed": "5"})
    order = CompileRequest(spec=spec(found / "small.safetensors", operatingPoints=[PLAIN]), folder=found)
    done = subprocess.run(
        [sys.executable, "-m", "trimtab_model_servers.compile_worker"],
        input=order.model_dump_json(by_alias=True),
        capture_output=True,
        text=True,
        check=True,
    )
    answer = CompileResult.model_validate_json(done.stdout.splitlines()[-1])
    assert answer.failed == ""
    return found


@pytest.fixture(scope="module")
def form(folder):
    return next(folder.glob(f"*{SUFFIX}")).stem


def at(folder, form, **changes):
    native = PLAIN | {"name": "native", "compiled": form} | changes
    return spec(folder / "small.safetensors", operatingPoints=[PLAIN, native])


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_compiled_point_equals_uncompiled_for_any_rows(folder, form, rows):
    model, pictures, tasks = load_model(at(folder, form)), images(rows), [0, 1, 1, 0][:rows]
    plain, native = (answers(model, name, pictures, tasks) for name in ("plain", "native"))

    assert torch.equal(plain["label"], native["label"])
    assert torch.allclose(plain["logits"], native["logits"], atol=1e-4)


@needs_compiler
def test_compiled_point_runs_native_code_only(folder, form, monkeypatch):
    model = load_model(at(folder, form))

    def never(*_):
        raise AssertionError("something else than native code computes")

    monkeypatch.setattr(VisionTransformer, "forward", never)
    monkeypatch.setattr(compiled, "compile_form", never)
    assert len(answers(model, "native", images(3), [0, 1, 0])["label"]) == 3
    with pytest.raises(AssertionError, match="something else"):
        answers(model, "plain", images(3), [0, 1, 0])


@needs_compiler
def test_a_form_holds_no_weights_but_takes_those_in_memory(folder, form, tmp_path):
    shutil.copy(folder / f"{form}{SUFFIX}", tmp_path)
    stored = load(folder / "small.safetensors")
    for parameter in stored.transformer.parameters():
        parameter.zero_()
    own = load_form(form, tmp_path, stored.transformer)

    assert not own.run(torch.rand(2, 1, 16, 16)).any(), "weights of zero leave nothing"


@needs_compiler
def test_form_with_other_content_than_its_name_says_is_not_run(folder, form, tmp_path):
    shutil.copy(folder / "small.safetensors", tmp_path)
    (tmp_path / f"{form}{SUFFIX}").write_bytes((folder / f"{form}{SUFFIX}").read_bytes() + b"\0")

    with pytest.raises(ModelError, match=r"'native': .* does not match its name"):
        load_model(at(tmp_path, form))


@needs_compiler
@pytest.mark.parametrize(
    ("here", "words"),
    [
        ({"instructions": lambda: frozenset({"sse"})}, "compiled for a processor with .*, which this one lacks"),
        ({"platform.machine": lambda: "s390x"}, r"compiled with torch .* for .*; compile it again here"),
    ],
)
def test_form_of_another_machine_is_rejected_before_loading(folder, form, monkeypatch, here, words):
    for name, value in here.items():
        monkeypatch.setattr(f"trimtab_model_servers.transformer.compiled.{name}", value)
    monkeypatch.setattr("torch._inductor.aoti_load_package", lambda _: pytest.fail("it was loaded"))

    with pytest.raises(ModelError, match=words):
        load_model(at(folder, form))


@needs_compiler
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compiled": "inductor-0"}, r"inductor-0.pt2 does not exist"),
        ({"compiled": "fastest"}, "unknown compiled form 'fastest'; `trimtab tune` writes them"),
        ({"precision": "INT8"}, "a compiled form supports neither prompts nor INT8"),
    ],
)
def test_invalid_compiled_point_is_rejected(folder, form, changes, words):
    with pytest.raises(ModelError, match=f"operating point 'native': .*{words}"):
        load_model(at(folder, form, **changes))


@needs_compiler
def test_form_for_smaller_batches_or_another_shape_is_rejected(folder, form):
    larger = at(folder, form).replace(max_batch_size=8)
    with pytest.raises(ModelError, match="compiled for 4 rows at most, and the variant's maxBatchSize is 8"):
        load_model(larger)

    other = VisionTransformer(SHAPE.replace(depth=2)).eval()
    with pytest.raises(ModelError, match="compiled for a transformer of another shape"):
        load_form(form, folder, other)


def test_other_file_is_not_a_form(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt2", "w") as packed:
        packed.writestr("anything", "else")
    name = compiled.form_name(tmp_path / "a.pt2")
    (tmp_path / "a.pt2").rename(tmp_path / f"{name}{SUFFIX}")

    with pytest.raises(ModelError, match="not a form compiled by"):
        load_form(name, tmp_path, VisionTransformer(SHAPE))


def test_without_a_compiler_it_is_said_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ModelError, match=r"no C\+\+ compiler .no-such-compiler."):
        compile_form(VisionTransformer(SHAPE), ForwardPlan(), None, 2, tmp_path)


@pytest.mark.parametrize(
    ("reported", "found"),
    [
        ("processor\t: 0\nflags\t\t: fpu hypervisor avx2 avx512_bf16\n", {"avx2", "avx512_bf16"}),
        ("processor\t: 0\nFeatures\t: fp cpuid asimd i8mm bf16\n", {"asimd", "i8mm", "bf16"}),
        ("processor\t: 0\n", set()),
        (None, set()),
    ],
)
def test_instructions_are_filtered_by_prefix(tmp_path, reported, found):
    if reported is not None:
        (tmp_path / "cpuinfo").write_text(reported)
    assert instructions(tmp_path / "cpuinfo") == found
