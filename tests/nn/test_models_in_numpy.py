"""FinalMLP, MaskNet, MMoE and PLE: values against plain NumPy, one sample at a time."""

import numpy as np
import pytest
import torch

from persia.nn.models import PLE, FinalMLP, MaskNet, MMoE
from support.histories import Numbers, history_schema, made_inputs, sigmoid, softmax

LABELS = ("click", "buy")


def made(make, dense=2, **options):
    """Logits of a model, its parameters as arrays, and the inputs of each sample: pooled, in order of the schema."""
    torch.manual_seed(1)
    schema = history_schema(labels=LABELS, dense=dense)
    model = make(schema, **options)
    x, embeddings = made_inputs(schema)
    numbers = Numbers(model, x, embeddings)
    for row in range(len(x)):
        for name in ("items", "shops"):
            events = numbers.events[name][row]
            numbers.events[name][row] = events.mean(0) if len(events) else np.zeros(events.shape[1])
    samples = [
        {
            **{name: values[row] for name, values in numbers.pooled.items()},
            **{name: values[row] for name, values in numbers.events.items()},
            "dense": numbers.dense[row],
        }
        for row in range(len(x))
    ]
    return model(x, embeddings).detach().numpy(), numbers, samples


def layers(numbers, name, x, count):
    """Linear layers, each with ReLU."""
    for layer in range(count):
        x = np.maximum(numbers.linear(f"{name}.{2 * layer}", x), 0)
    return x


@pytest.mark.parametrize("gates", [((), ()), (("user",), ("item", "items"))])
def test_final_mlp_fuses_two_gated_streams(gates):
    logits, numbers, samples = made(FinalMLP, gates=gates, hidden=(8, 6), hidden2=(4,), gate_hidden=5, heads=2)
    of = numbers.of
    for sample, found in zip(samples, logits, strict=True):
        x = np.concatenate(list(sample.values()))
        outputs = []
        for number, depth in ((0, 2), (1, 1)):
            names = gates[number]
            read = np.concatenate([sample[n] for n in names]) if names else of[f"gates.{number}.context"][0]
            hidden = np.maximum(numbers.linear(f"gates.{number}.network.0", read), 0)
            gate = 2 * sigmoid(numbers.linear(f"gates.{number}.network.2", hidden))
            outputs.append(layers(numbers, f"streams.{number}", gate * x, depth))
        expected = numbers.linear("linear", np.concatenate(outputs))
        for label in range(2):
            for head in range(2):
                first, second = outputs[0][3 * head : 3 * head + 3], outputs[1][2 * head : 2 * head + 2]
                expected[label] += first @ of["bilinear"][head, :, :, label] @ second
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def layer_norm(numbers, name, x):
    normal = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    return normal * numbers.of[f"{name}.weight"] + numbers.of[f"{name}.bias"]


@pytest.mark.parametrize("kind", ["parallel", "serial"])
@pytest.mark.parametrize("dense", [0, 2])
def test_mask_net_multiplies_by_what_the_sample_computes(kind, dense):
    logits, numbers, samples = made(MaskNet, dense, kind=kind, blocks=3, width=5, reduction=1.5, hidden=(6,))
    assert len(numbers.of["blocks.0.mask.0.bias"]) == round(1.5 * len(numbers.of["blocks.0.mask.2.bias"]))
    for sample, found in zip(samples, logits, strict=True):
        numbers_of_dense = sample.pop("dense")
        features = list(sample.values())
        if dense:
            features.append(numbers.linear("dense", numbers_of_dense))
        guide = np.concatenate(features)
        normal = np.concatenate([layer_norm(numbers, f"norms.{i}", f) for i, f in enumerate(features)])
        x, outputs = normal, []
        for block in range(3):
            hidden = np.maximum(numbers.linear(f"blocks.{block}.mask.0", guide), 0)
            mask = numbers.linear(f"blocks.{block}.mask.2", hidden)
            masked = mask * (x if kind == "serial" else normal)
            x = np.maximum(
                layer_norm(numbers, f"blocks.{block}.norm", numbers.linear(f"blocks.{block}.linear", masked)), 0
            )
            outputs.append(x)
        top = x if kind == "serial" else np.concatenate(outputs)
        expected = numbers.linear("deep.2", np.maximum(numbers.linear("deep.0", top), 0))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def tower(numbers, task, x):
    return numbers.linear(f"towers.{task}.2", np.maximum(numbers.linear(f"towers.{task}.0", x), 0))[0]


def test_mmoe_has_a_gate_for_each_label():
    logits, numbers, samples = made(MMoE, experts=3, expert_hidden=(7, 5), hidden=(4,))
    for sample, found in zip(samples, logits, strict=True):
        x = np.concatenate(list(sample.values()))
        experts = [layers(numbers, f"experts.{e}", x, 2) for e in range(3)]
        for task in range(2):
            weights = softmax(numbers.of[f"gates.{task}.weight"] @ x)
            mixed = sum(w * e for w, e in zip(weights, experts, strict=True))
            assert found[task] == pytest.approx(tower(numbers, task, mixed), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_ple_extracts_by_label_and_in_common(levels):
    logits, numbers, samples = made(PLE, levels=levels, experts=2, shared_experts=3, expert_hidden=(6,), hidden=(4,))
    for sample, found in zip(samples, logits, strict=True):
        first = np.concatenate(list(sample.values()))
        a, b, shared = first, first, first
        for level in range(levels):
            name = f"levels.{level}"
            of_a = [layers(numbers, f"{name}.experts.0.{e}", a, 1) for e in range(2)]
            of_b = [layers(numbers, f"{name}.experts.1.{e}", b, 1) for e in range(2)]
            of_all = [layers(numbers, f"{name}.experts.2.{e}", shared, 1) for e in range(3)]
            gate_a = softmax(numbers.of[f"{name}.gates.0.weight"] @ a)
            gate_b = softmax(numbers.of[f"{name}.gates.1.weight"] @ b)
            last = level == levels - 1
            assert (f"{name}.shared_gate.weight" in numbers.of) != last
            if not last:
                gate = softmax(numbers.of[f"{name}.shared_gate.weight"] @ shared)
                shared = np.array(gate) @ np.array([*of_a, *of_b, *of_all])
            a, b = gate_a @ np.array([*of_a, *of_all]), gate_b @ np.array([*of_b, *of_all])
        expected = [tower(numbers, 0, a), tower(numbers, 1, b)]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [FinalMLP, MaskNet, MMoE, PLE])
def test_gradients_reach_all_parameters(make):
    torch.manual_seed(0)
    schema = history_schema(labels=LABELS)
    model = make(schema)
    x, embeddings = made_inputs(schema, rows=32)
    model(x, embeddings).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
