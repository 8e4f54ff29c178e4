"""Which methods of TensorRT-LLM are changed, and what is said where one is not. On stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import stand_ins as upstream
from installed import (
    K,
    pair,
    same,
    traces,
)
from recording import Recording, whole

from fusions.csa2 import HiddenStateProjections
from fusions.integrations import methods, rewrite
from fusions.integrations.tensorrt_llm import (
    KNOWN_FORMS,
    UnknownForm,
    install_csa2,
    install_indexer,
    install_qkv_a,
)


@pytest.mark.parametrize(
    ("cls", "name", "kind"),
    [
        (upstream.DeepseekV41Attention, "forward", "csa2"),
        (upstream.Indexer, "pre_indexer_proj", "indexer"),
        (upstream.OptionalIndexer, "forward", "indexer"),
        (upstream.DeepseekV32Attention, "forward", "qkv_a"),
    ],
)
def test_the_known_forms_are_the_stand_ins(cls: type, name: str, kind: str) -> None:
    method = methods.named(cls, name)
    assert method is not None
    form = KNOWN_FORMS[method.digest]
    assert form.kind == kind
    assert form.source.startswith("stand-in")
    assert f"{cls.__name__}.{name}" in form.source


def test_no_form_is_known_that_no_test_has_met() -> None:
    assert len(KNOWN_FORMS) == 4


class Plain:
    def method(self, x):
        y = self.f(x)
        return y + 1


class LaidOut:
    def method(self: Any, x: int) -> int:
        """Described."""
        y = self.f(
            x,
        )  # and commented
        return y + 1


class Changed:
    def method(self, x):
        y = self.f(x)
        return y + 2


def test_a_form_is_what_a_method_does_not_how_it_is_written() -> None:
    plain, laid_out, changed = (methods.named(cls, "method") for cls in (Plain, LaidOut, Changed))
    assert plain.digest == laid_out.digest
    assert plain.digest != changed.digest


UNKNOWN = [
    (
        upstream.RenamedAttention,
        install_csa2,
        ["-    latent = self.wq_a(h)", "q_latent, kv_latent = self.hidden_state_projections.project(h)"],
    ),
    (
        upstream.RewordedIndexer,
        install_indexer,
        [
            "-    indexer_k, weights = torch.split(product",
            "+    indexer_k, weights = self.indexer_projection.project(hid",
        ],
    ),
    (upstream.RewordedV32Attention, install_qkv_a, ["out = self.fused_qkv_a.project(hidden_states)", 'out["wk"]']),
]


@pytest.mark.parametrize(("cls", "install", "lines"), UNKNOWN)
def test_an_unknown_form_is_refused_with_the_patch(cls: type, install: Callable[..., Any], lines: list[str]) -> None:
    module = cls()
    before = dict(vars(module)), dict(module._modules), {k: v.data_ptr() for k, v in module.state_dict().items()}
    with pytest.raises(UnknownForm, match="is of no known form") as refusal:
        install(module)
    for line in [
        *lines,
        "force=True",
        methods.named(cls, "pre_indexer_proj" if "Ind" in cls.__name__ else "forward").digest,
    ]:
        assert line in str(refusal.value)
    assert before == (
        dict(vars(module)),
        dict(module._modules),
        {k: v.data_ptr() for k, v in module.state_dict().items()},
    )


def test_the_patch_that_is_printed_works_when_applied_by_hand() -> None:
    """The diff's lines, put into the source, are a method that does the same."""

    method = methods.named(upstream.RenamedAttention, "forward")
    changed = rewrite.hoist(method, {"wq_a": "q_latent", "wkv": "kv_latent"}, "self.hidden_state_projections.project")
    attn, twin = pair(upstream.RenamedAttention)
    attn.hidden_state_projections = HiddenStateProjections(attn.wq_a, attn.wkv, op=(op := Recording()), policy="*")
    upstream.walk(attn)
    assert same(methods.build(method, changed)(attn, whole(1, K)), twin(whole(1, K)))
    assert [call.columns for call in op.calls] == [640]


def _lambda(self, h):
    return [f() for f in (lambda: self.wq_a(h), lambda: self.wkv(h))]


def _twice(self, h):
    return self.wq_a(h), self.wq_a(h), self.wkv(h)


def _two_operands(self, h, g):
    return self.wq_a(h), self.wkv(g)


def _expression(self, h):
    return self.wq_a(h[:1]), self.wkv(h[:1])


def _assigned(self, h):
    q = self.wq_a(h)
    h = h + 1
    return q, self.wkv(h)


def _branches(self, h):
    if h.shape[0] > 1:
        q = self.wq_a(h)
    return q, self.wkv(h)


def _else_branch(self, h):
    if h.shape[0] > 1:
        q = self.wq_a(h)
    else:
        q = self.wkv(h)
    return q


def _head(self, h):
    while self.wq_a(h).sum() > 0:
        h = self.wkv(h)


def _weight(self, h):
    return self.wq_a(h), self.wkv(h), self.wkv.weight


def _keyword(self, h):
    return self.wq_a(h), self.wkv(h, scale=2)


def _name_taken(self, h):
    q_latent = 1
    return self.wq_a(h), self.wkv(h), q_latent


def _private(self, h):
    return self.wq_a(h), self.wkv(h), self.__hidden


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (_lambda, "in a function of its own"),
        (_twice, "calls self.wq_a 2 times"),
        (_two_operands, "not called with one variable"),
        (_expression, "not called with one variable"),
        (_assigned, "h is assigned to between the calls"),
        (_branches, "called in different branches"),
        (_else_branch, "called in different branches"),
        (_head, "called in the head of a block"),
        (_weight, "uses self.wkv in other ways"),
        (_keyword, "uses self.wkv in other ways"),
        (_name_taken, "has a variable q_latent already"),
        (_private, "private name __hidden"),
    ],
)
def test_a_forward_of_another_shape_cannot_be_changed_not_even_by_force(
    forward: Callable[..., Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream.DeepseekV41Attention, "forward", forward)
    attn = upstream.DeepseekV41Attention()
    with pytest.raises(UnknownForm, match=why) as refusal:
        install_csa2(attn, force=True)
    assert "q_latent for self.wq_a(hidden_states)" in str(refusal.value)
    assert not traces(attn)


def test_a_class_without_the_calls_or_with_a_method_replaced_on_the_instance_is_refused() -> None:
    with pytest.raises(UnknownForm, match=r"has no method.*calls self\.wq_a"):
        install_csa2(nn.Linear(2, 2))
    attn = upstream.DeepseekV41Attention()
    attn.forward = lambda h: h
    with pytest.raises(UnknownForm, match="replaced on the instance by somebody else"):
        install_csa2(attn, force=True)


def test_the_changed_method_keeps_decorators_defaults_and_super() -> None:
    class Sub(upstream.DeepseekV41Attention):
        @torch.no_grad()
        def forward(self, h, scale=3.0, *, factor=2.0):
            assert super().__init__ is not None
            assert not torch.is_grad_enabled()
            return self.wq_a(h) * scale, self.wkv(h) * factor

    attn, twin = pair(Sub)
    install_csa2(attn, force=True)
    with torch.enable_grad():
        assert same(attn(whole(2, K)), twin(whole(2, K)))
        assert same(attn(whole(2, K), 0.5, factor=8.0), twin(whole(2, K), 0.5, factor=8.0))


def test_tensorrt_llm_is_never_imported() -> None:
    folder = Path(methods.__file__).parent
    assert not [
        p for p in folder.glob("*.py") if "import tensorrt_llm" in p.read_text() or "importlib" in p.read_text()
    ]
    assert "tensorrt_llm" not in sys.modules
