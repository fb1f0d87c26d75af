import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo.data import (
    IGNORED,
    Batch,
    BatchStream,
    ByteTokenizer,
    Deal,
    EvalBatches,
    SampleOrder,
    bits_per_byte,
    count_samples,
    make_batch,
    open_tokenizer,
)
from hymo.data.prepare import prepare

TEXTS = [bytes([97 + i % 26]) * (3 + 7 * i % 11) for i in range(50)]
SEQ_LEN, DEPTH, SAMPLES = 8, 2, 5


def equal(a: list[Batch], b: list[Batch]) -> bool:
    if len(a) != len(b):
        return False
    pairs = [(vars(one), vars(two)) for one, two in zip(a, b, strict=True)]
    return all(torch.equal(one[name], two[name]) for one, two in pairs for name in one)


@pytest.fixture
def stream(token_set):
    data = token_set(TEXTS)
    order = SampleOrder(count_samples(data, SEQ_LEN, DEPTH), 11, data.fingerprint)

    def make(start: int = 0, **changes) -> BatchStream:
        values = {"seq_len": SEQ_LEN, "mtp_depth": DEPTH, "micro_batch_size": 2} | changes
        return BatchStream(data, order, start, SAMPLES, **values)

    make.data, make.order = data, order
    return make


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_resume_at_every_attempt_gives_the_batches_of_an_uninterrupted_run(stream, threads):
    with stream(threads=0) as straight:
        whole = list(itertools.islice(straight, 26))
    assert 2 * stream.order.n_samples < 26 * SAMPLES  # epochs end within
    for k in range(21):
        with stream(threads=threads) as before:
            first = list(itertools.islice(before, k))
            position = before.position
        with stream(position, threads=threads) as after:
            rest = list(itertools.islice(after, 26 - k))
        assert position == k * SAMPLES
        assert all(equal(a, b) for a, b in zip(first + rest, whole, strict=True))


def test_two_resumes_in_a_row(stream):
    with stream() as straight:
        whole = list(itertools.islice(straight, 12))
    parts, position = [], 0
    for count in (5, 3, 4):  # the second resume starts from the position that the first one reached
        with stream(position) as part:
            parts += list(itertools.islice(part, count))
            position = part.position
    assert all(equal(a, b) for a, b in zip(parts, whole, strict=True))


def rows(batches: list[Batch]) -> list[list[int]]:
    return [row for batch in batches for row in batch.tokens_BL[batch.real_B].tolist()]


def test_the_same_global_order_on_2_then_3_then_1_ranks(stream):
    n_attempts = 9
    expected = [
        rows([make_batch(stream.data, stream.order, list(range(p, p + SAMPLES)), SEQ_LEN, DEPTH)])
        for p in range(0, n_attempts * SAMPLES, SAMPLES)
    ]
    got, position = [], 0
    for world_size in (2, 3, 1):
        ranks = [stream(position, rank=rank, world_size=world_size) for rank in range(world_size)]
        for _ in range(n_attempts // 3):
            attempts = [next(rank) for rank in ranks]
            assert len({len(attempt) for attempt in attempts}) == 1  # as many micro-batches on each
            got.append([row for attempt in attempts for row in rows(attempt)])
        [position] = {rank.position for rank in ranks}
        for rank in ranks:
            rank.close()
    assert got == expected


def test_each_epoch_uses_every_window_once(stream):
    n = stream.order.n_samples
    windows = sorted(rows([make_batch(stream.data, stream.order, [p], SEQ_LEN, DEPTH) for p in range(n)]))
    with stream() as attempts:
        seen = [row for attempt in itertools.islice(attempts, 3 * n // SAMPLES + 1) for row in rows(attempt)]
    for epoch in range(3):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == windows
    assert seen[:n] != seen[n : 2 * n]  # and in another order


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 7), st.integers(0, 100))
def test_dealing(samples, world_size, micro_batch_size, position):
    deal = Deal(samples, world_size, micro_batch_size)
    runs = [deal.run_of(rank) for rank in range(world_size)]
    assert [i for run in runs for i in run] == list(range(samples))  # contiguous, in order of ranks
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert deal.n_micro_batches == math.ceil(math.ceil(samples / world_size) / micro_batch_size)
    filler = 0
    for rank in range(world_size):
        batches = deal.rows(rank, position)
        assert [len(batch) for batch in batches] == [micro_batch_size] * deal.n_micro_batches
        flat = [p for batch in batches for p in batch]
        assert flat[: len(runs[rank])] == [position + i for i in runs[rank]]
        filler += flat.count(None)
    assert filler == sum(p is None for rank in range(world_size) for batch in deal.rows(rank, 0) for p in batch)
    assert deal.padded_share == pytest.approx(filler / (filler + samples))


def test_a_failure_in_a_thread_reaches_the_caller(stream, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("the disk went away")

    monkeypatch.setattr("hymo.data.loader.make_batch", fail)
    with stream(threads=1) as attempts, pytest.raises(OSError, match="the disk went away"):
        next(attempts)


def test_the_wait_is_measured(stream):
    with stream(threads=0) as attempts:
        next(attempts)
        assert attempts.wait_s > 0


def evaluation(data, tokenizer=None, **changes) -> EvalBatches:
    values = {"seq_len": SEQ_LEN, "mtp_depth": DEPTH, "batch_size": 3} | changes
    return EvalBatches(data, (tokenizer or ByteTokenizer()).token_bytes, **values)


@pytest.mark.parametrize("world_size", [1, 2, 3, 50])
def test_evaluation_predicts_all_but_first_tokens_once_on_any_number_of_ranks(stream, world_size):
    data = stream.data
    ranks = [evaluation(data, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [list(rank) for rank in ranks]
    assert {len(b) for b in batches} == {ranks[0].n_batches}  # as many forwards on each
    labels = [batch.labels_KBT[0] for rank in batches for batch in rank]
    valid = torch.cat([x[x != IGNORED] for x in labels])
    expected = [token for i in range(data.n_documents) for token in data.document(i)[1:].tolist()]
    assert valid.tolist() == expected
    assert ranks[0].n_labels == len(expected) == data.n_tokens - data.n_documents
    # The bytes that the labels spell: all but the first of each document.
    assert ranks[0].n_bytes == data.n_bytes - data.n_documents
    assert equal(batches[0], list(ranks[0]))  # and again the same


def test_evaluation_of_part_is_spread_over_the_set(stream):
    part = evaluation(stream.data, max_tokens=3 * SEQ_LEN)
    assert part.n_windows == 3
    n_all = evaluation(stream.data).n_windows
    expected = [stream.data.read(i * n_all // 3 * SEQ_LEN, i * n_all // 3 * SEQ_LEN + SEQ_LEN)[0] for i in range(3)]
    assert [row[:SEQ_LEN] for row in rows(list(part))] == [tokens.tolist() for tokens in expected]
    valid = torch.cat([batch.labels_KBT[0].flatten() for batch in part])
    assert part.n_labels == (valid != IGNORED).sum()
    assert part.n_bytes == ((valid != IGNORED) & (valid < 256)).sum()
    assert evaluation(stream.data, max_tokens=10**9).n_labels == evaluation(stream.data).n_labels


def test_labels_and_bytes_of_a_set_are_counted_once(stream, monkeypatch):
    first = evaluation(stream.data)
    counts = first.n_labels, first.n_bytes
    part = evaluation(stream.data, max_tokens=SEQ_LEN)
    assert part.n_labels < counts[0]
    monkeypatch.setattr("hymo.data.loader.windows", None)  # nothing can be read
    again = evaluation(stream.data, batch_size=2)
    assert (again.n_labels, again.n_bytes) == counts


def test_bits_per_byte_is_exact_where_the_answer_is_known(stream):
    # A model that gives each of 260 tokens the same chance spends ln 260 a label; end tokens are labels without bytes.
    data, ev = stream.data, evaluation(stream.data)
    nats = ev.n_labels * math.log(260)
    text_bytes = data.n_bytes - data.n_documents
    assert bits_per_byte(nats, ev.n_bytes) == pytest.approx(math.log2(260) * (1 + data.n_documents / text_bytes))
    assert math.isnan(bits_per_byte(0.0, 0))


def test_bytes_of_labels_with_a_bpe(tmp_path, settings, bpe_file):
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"def f{i}(x):\n    return x + {i}  # né 漢\n" * (i + 1))
    source = [str(path) for path in sorted(tmp_path.glob("*.txt"))]
    data = prepare(settings(source, tokenizer=str(bpe_file)))
    tokenizer = open_tokenizer(str(bpe_file))
    ev = evaluation(data.train, tokenizer)
    first = sum(int(tokenizer.token_bytes[data.train.document(i)[0]]) for i in range(data.train.n_documents))
    assert ev.n_bytes == data.train.n_bytes - first


def test_a_validation_set_of_one_token(token_set):
    ev = evaluation(token_set([b""]))
    assert (ev.n_batches, ev.n_labels, ev.n_bytes) == (1, 0, 0)
    [batch] = ev
    assert (batch.labels_KBT == IGNORED).all()
