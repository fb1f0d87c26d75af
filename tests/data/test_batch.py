import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hymo.data import (
    IGNORED,
    ByteTokenizer,
    DataError,
    SampleOrder,
    count_samples,
    left_over_tokens,
    make_batch,
)
from hymo.data.batch import windows

END = ByteTokenizer.end_id
TEXTS = [b"abcde", b"", b"fg", b"hijklmnopqrstu", b"v", b"wxyz0123456789"]


class InOrder(SampleOrder):
    def index(self, position: int) -> int:
        return position % self.n_samples


def stream(texts: list[bytes]) -> tuple[list[int], list[int]]:
    tokens = [token for text in texts for token in (*text, END)]
    documents = [i for i, text in enumerate(texts) for _ in range(len(text) + 1)]
    return tokens, documents


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seq_len", [1, 3, 8])
def test_batches_follow_the_rule(token_set, seq_len, depth):
    data = token_set(TEXTS)
    tokens, documents = stream(TEXTS)
    n = count_samples(data, seq_len, depth)
    batch = make_batch(data, InOrder(n, 0, ""), list(range(n)), seq_len, depth)
    assert batch.tokens_BL.dtype == batch.labels_KBT.dtype == torch.int64
    assert batch.doc_ids_BL.dtype == torch.int32
    assert batch.tokens_BL.shape == batch.doc_ids_BL.shape == (n, seq_len + depth)
    assert batch.labels_KBT.shape == (1 + depth, n, seq_len)
    assert batch.real_B.all()
    for b in range(n):
        start = b * seq_len
        window = slice(start, start + seq_len + depth)
        assert batch.tokens_BL[b].tolist() == tokens[window]
        assert batch.doc_ids_BL[b].tolist() == [d - documents[start] for d in documents[window]]
        for k in range(1 + depth):
            for t in range(seq_len):
                here, there = start + t, start + t + 1 + k
                expected = tokens[there] if documents[there] == documents[here] else IGNORED
                assert batch.labels_KBT[k, b, t] == expected


def test_labels_at_a_boundary(token_set):
    # "ab" END "cdef" END: the end token is predicted, a first token never, and depth k masks k + 1 places.
    batch = windows(token_set([b"ab", b"cdef"]), [0], 4, 2)
    c, d, e, f = b"cdef"
    assert batch.tokens_BL.tolist() == [[97, 98, END, c, d, e]]
    assert batch.doc_ids_BL.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert batch.labels_KBT[:, 0].tolist() == [[98, END, IGNORED, d], [END, IGNORED, IGNORED, e], [IGNORED] * 3 + [f]]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 7), st.integers(0, 2))
def test_every_token_is_an_input_once_or_left_over(token_set_of, lengths, seq_len, depth):
    data = token_set_of(lengths)
    if data.n_tokens - 1 - depth < seq_len:
        with pytest.raises(DataError, match=r"less than one sample of training.seq_len"):
            count_samples(data, seq_len, depth)
        return
    n = count_samples(data, seq_len, depth)
    batch = make_batch(data, SampleOrder(n, 0, data.fingerprint), list(range(n)), seq_len, depth)
    inputs = batch.tokens_BL[:, :seq_len].flatten().tolist()
    rest = left_over_tokens(data, seq_len, depth)
    assert 1 + depth <= rest <= seq_len + depth
    tokens = data.read(0, data.n_tokens)[0].tolist()
    assert sorted(inputs) == sorted(tokens[: data.n_tokens - rest])


@pytest.fixture
def token_set_of(token_set, tmp_path_factory):
    return lambda lengths: token_set(
        [bytes([97 + i]) * n for i, n in enumerate(lengths)], tmp_path_factory.mktemp("s").name
    )


def test_changing_one_document_changes_nothing_of_the_others(token_set):
    other = [TEXTS[0], TEXTS[1], TEXTS[2], b"HIJKLMNOPQRSTU", *TEXTS[4:]]
    a, b = (windows(token_set(texts, name), [0, 9, 18], 9, 2) for name, texts in (("a", TEXTS), ("b", other)))
    _, documents = stream(TEXTS)
    for row, start in enumerate([0, 9, 18]):
        outside = torch.tensor([documents[start + t] != 3 for t in range(9)])
        assert torch.equal(a.labels_KBT[:, row, outside], b.labels_KBT[:, row, outside])
    assert torch.equal(a.doc_ids_BL, b.doc_ids_BL)


def test_filler_rows_count_for_nothing(token_set):
    data = token_set(TEXTS)
    order = SampleOrder(count_samples(data, 4, 1), 0, "")
    batch = make_batch(data, order, [None, 2, None], 4, 1)
    assert batch.real_B.tolist() == [False, True, False]
    assert (batch.labels_KBT[:, [0, 2]] == IGNORED).all()
    assert (batch.tokens_BL[[0, 2]] == 0).all()
    assert (batch.doc_ids_BL[[0, 2]] == 0).all()
    assert torch.equal(batch.labels_KBT[:, 1], make_batch(data, order, [2], 4, 1).labels_KBT[:, 0])


def test_a_window_past_the_end_is_a_document_without_labels(token_set):
    data = token_set([b"ab", b"cd"])  # 6 tokens
    batch = windows(data, [4], 4, 2)
    assert batch.tokens_BL.tolist() == [[ord("d"), END, 0, 0, 0, 0]]
    assert batch.doc_ids_BL.tolist() == [[0, 0, 1, 1, 1, 1]]
    assert batch.labels_KBT[:, 0].tolist() == [[END, IGNORED, IGNORED, IGNORED], [IGNORED] * 4, [IGNORED] * 4]


def test_to_moves_all(token_set):
    batch = windows(token_set(TEXTS), [0], 4, 0).to("meta")
    assert {tensor.device.type for tensor in vars(batch).values()} == {"meta"}
