"""Losses of `persia.nn.losses` as their papers write them: numpy in float64, one row, pair or group after another."""

import math

import numpy as np


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def mean(values, weights):
    """The weighted mean of numbers; 0 if their weights are all 0."""
    total = sum(weights)
    return sum(w * v for v, w in zip(values, weights, strict=True)) / total if total else 0.0


def binary_cross_entropy(logit, label, positive_weight=1.0):
    p = sigmoid(logit)
    return -(positive_weight * label * math.log(p) + (1 - label) * math.log(1 - p))


def focal(logit, label, gamma, alpha):
    """Equation 5 of arXiv 1708.02002, for labels 0 and 1."""
    p = sigmoid(logit)
    p_t = p if label else 1 - p
    alpha_t = 1 if alpha is None else alpha if label else 1 - alpha
    return -alpha_t * (1 - p_t) ** gamma * math.log(p_t)


def ordinal(logits, label):
    """Equation 5 of arXiv 1901.07884, with all importances 1."""
    return sum(binary_cross_entropy(logit, float(label > k)) for k, logit in enumerate(logits))


def entire_space(logit, through, label):
    """The term of pCTCVR in equation 3 of arXiv 1804.07931."""
    p = sigmoid(through) * sigmoid(logit)
    return -(label * math.log(p) + (1 - label) * math.log(1 - p))


def pairwise(cost, scores, labels, groups, weights):
    """The weighted mean of `cost(s_i - s_j)` over pairs of a group with label i > label j."""
    rows = range(len(scores))
    pairs = [(i, j) for i in rows for j in rows if groups[i] == groups[j] and labels[i] > labels[j]]
    return mean([cost(scores[i] - scores[j]) for i, j in pairs], [weights[i] for i, _ in pairs])


def listwise_softmax(scores, labels, groups, weights, known, graded):
    """The cross-entropy of each group's shares and softmax."""
    terms, counts = [], []
    for group in np.unique(groups):
        rows = [i for i in range(len(scores)) if groups[i] == group and known[i]]
        targets = [math.exp(labels[i]) if graded else labels[i] for i in rows]
        total = sum(math.exp(scores[i]) for i in rows)
        for i, target in zip(rows, targets, strict=True):
            share = target / sum(targets) if sum(targets) else 0.0
            terms.append(-math.log(math.exp(scores[i]) / total))
            counts.append(weights[i] * share)
    return mean(terms, counts)


def jrc(logits, labels, groups, weights, known, alpha):
    """The pseudo-code of arXiv 2208.06164, figure 2: a mean over the rows of each context, for labels 0 and 1."""
    terms, counts = [], []
    for i in range(len(labels)):
        if not known[i]:
            continue
        own = int(labels[i])
        context = [j for j in range(len(labels)) if groups[j] == groups[i] and known[j]]
        calibration = -math.log(math.exp(logits[i][own]) / sum(map(math.exp, logits[i])))
        ranking = -math.log(math.exp(logits[i][own]) / sum(math.exp(logits[j][own]) for j in context))
        terms.append(alpha * calibration + (1 - alpha) * ranking)
        counts.append(weights[i])
    return mean(terms, counts)
