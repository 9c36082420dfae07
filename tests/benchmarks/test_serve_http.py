"""Latencies of benchmarks/serve_http.py."""

from benchmarks.serve_http import DEADLINE, Answer, waited


def test_a_refusal_does_not_count_as_a_fast_answer():
    assert waited(Answer(status=200, latency=0.01, seconds=0.01)) == 0.01
    assert waited(Answer(status=503, latency=0.01, seconds=0.01)) == DEADLINE
    assert waited(Answer(status=503, latency=3 * DEADLINE, seconds=0.01)) == 3 * DEADLINE
