"""What a user would pick instead, on one GPU at the shapes of hymo_750m: recurrences, optimizers, a model; ceilings.

    python benchmarks/peers.py [SECTION ...]        # fla_gla sdpa opt_dion e2e_fla ..., all without a name

Needs a GPU. Peers that are not installed are passed over with their error printed; dion has to be on PYTHONPATH as a
folder. peers.json is written to $OUT (default: here) after each figure.
"""

import json
import os
import sys
import time
import traceback

import torch
import triton
from triton.testing import do_bench

out = {}
OUT = os.environ.get("OUT", ".")
dev = "cuda"


def med(fn, rep=200, warm=50):
    return do_bench(fn, warmup=warm, rep=rep, return_mode="median")


def note(k, v):
    out[k] = v
    print(k, v, flush=True)
    with open(f"{OUT}/peers.json", "w") as file:
        json.dump(out, file, indent=1)


def section(f):
    try:
        t = time.time()
        f()
        print(f"-- {f.__name__} {time.time() - t:.1f}s", flush=True)
    except Exception:
        print("FAILED", f.__name__, traceback.format_exc()[-1500:], flush=True)


def ceilings():
    x = torch.randn(1 << 30, device=dev, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    ms = med(lambda: y.copy_(x))
    note("copy_TBps", round(2 * x.numel() * 2 / ms / 1e9, 2))
    a = torch.randn(8192, 8192, device=dev, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    ms = med(lambda: a @ b)
    note("matmul_TFLOPs", round(2 * 8192**3 / ms / 1e9, 1))


B, T, H, D, S = 4, 4096, 40, 32, 32


def inputs(dtype=torch.bfloat16, K=S, V=D, H=H):
    g = torch.Generator(device=dev).manual_seed(0)

    def r(*s):
        return torch.randn(*s, device=dev, dtype=torch.float32, generator=g)

    v = r(B, T, H, V).to(dtype)
    b = (r(B, T, H, K) / K**0.5).to(dtype)
    c = r(B, T, H, K).to(dtype)
    gate = torch.sigmoid(r(B, T, H))
    A = -torch.exp(torch.log(torch.arange(1, H + 1, device=dev).float()))[:, None].expand(H, K)
    return v, b, c, gate, A


def eager_recurrence():
    v, b, c, gate, A = inputs()

    def f():
        h = torch.zeros(B, H, S, D, device=dev)
        o = []
        for t in range(T):
            h = torch.exp(gate[:, t, :, None] * A)[..., None] * h + torch.einsum(
                "bhs,bhd->bhsd", b[:, t].float(), v[:, t].float()
            )
            o.append(torch.einsum("bhs,bhsd->bhd", c[:, t].float(), h))
        return torch.stack(o, 1)

    f()
    torch.cuda.synchronize()
    t = time.time()
    f()
    torch.cuda.synchronize()
    note("eager_loop_fwd_ms", round((time.time() - t) * 1e3, 1))


def bench_op(name, op, args, grads):
    with torch.no_grad():
        note(f"{name}_fwd_ms", round(med(lambda: op(*args)), 4))
    for a in grads:
        a.requires_grad_(True)
    o = op(*args)
    do = torch.randn_like(o)

    def fb():
        for a in grads:
            a.grad = None
        op(*args).backward(do)

    note(f"{name}_fwdbwd_ms", round(med(fb), 4))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    m0 = torch.cuda.memory_allocated()
    fb()
    torch.cuda.synchronize()
    note(f"{name}_peak_extra_MiB", round((torch.cuda.max_memory_allocated() - m0) / 2**20))


def fla_gla():
    from fla.ops.gla import chunk_gla

    v, b, c, gate, A = inputs()
    gk = (gate[..., None] * A).contiguous()
    bench_op("fla_gla", lambda q, k, v, g: chunk_gla(q, k, v, g, scale=1.0)[0], (c, b, v, gk), (c, b, v, gk))


def fla_simple_gla():
    from fla.ops.simple_gla import chunk_simple_gla

    v, b, c, gate, A = inputs()
    g = (gate * A[:, 0]).contiguous()
    bench_op(
        "fla_simple_gla", lambda q, k, v, g: chunk_simple_gla(q, k, v, g, scale=1.0)[0], (c, b, v, g), (c, b, v, g)
    )


def fla_gdr():
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    for h, k, vv in ((40, 32, 32), (10, 128, 128)):
        v, b, c, gate, A = inputs(K=k, V=vv, H=h)
        g = (gate * A[:, 0]).contiguous()
        beta = torch.sigmoid(torch.randn_like(g)).bfloat16()
        bn = torch.nn.functional.normalize(b.float(), dim=-1).bfloat16()
        cn = torch.nn.functional.normalize(c.float(), dim=-1).bfloat16()
        bench_op(
            f"fla_gated_delta_rule_H{h}_K{k}_V{vv}",
            lambda q, k, v, g, be: chunk_gated_delta_rule(q, k, v, g, be, scale=1.0)[0],
            (cn, bn, v, g, beta),
            (cn, bn, v, g, beta),
        )


def fla_kda():
    from fla.ops.kda import chunk_kda

    v, b, c, gate, A = inputs()
    gk = (gate[..., None] * A).contiguous()
    beta = torch.sigmoid(torch.randn(B, T, H, device=dev)).bfloat16()
    bn = torch.nn.functional.normalize(b.float(), dim=-1).bfloat16()
    cn = torch.nn.functional.normalize(c.float(), dim=-1).bfloat16()
    bench_op(
        "fla_kda",
        lambda q, k, v, g, be: chunk_kda(q, k, v, g, be, scale=1.0)[0],
        (cn, bn, v, gk, beta),
        (cn, bn, v, gk, beta),
    )


def sdpa():
    for dq, dv, nh in ((96, 64, 14), (64, 64, 14)):
        q = torch.randn(B, nh, T, dq, device=dev, dtype=torch.bfloat16, requires_grad=True)
        k = torch.randn_like(q, requires_grad=True)
        v = torch.randn(B, nh, T, dv, device=dev, dtype=torch.bfloat16, requires_grad=True)

        def f(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        bench_op(f"sdpa_qk{dq}_v{dv}", f, (q, k, v), (q, k, v))


def matrices():
    M = []
    for _ in range(24):
        M += [(1280, 896)] * 4 + [(896, 1280)] + [(2432, 896)] * 2 + [(896, 2432)]
    for _ in range(8):
        M += [(224, 896), (1344, 224), (160, 896), (1792, 128), (896, 896)]
    return M


def params(dtype=torch.float32):
    P = [torch.nn.Parameter(torch.randn(s, device=dev, dtype=dtype) * 0.02) for s in matrices()]
    for p in P:
        p.grad = torch.randn_like(p) * 1e-3
    return P


def wall(step, n=10):
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    ts = []
    for _ in range(n):
        t = time.perf_counter()
        step()
        torch.cuda.synchronize()
        ts.append(time.perf_counter() - t)
    return round(sorted(ts)[n // 2] * 1e3, 3)


def opt_sizes():
    n = sum(a * b for a, b in matrices())
    fl = sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in matrices())
    note("normuon_params_M", round(n / 1e6, 1))
    note("ns5_TFLOP", round(fl / 1e12, 3))
    note("n_matrices", len(matrices()))


def opt_torch_muon():
    P = params()
    o = torch.optim.Muon(P, lr=0.02, momentum=0.95, weight_decay=0.1)
    note("torch_Muon_ms", wall(o.step))


def opt_adamw():
    P = params()
    o = torch.optim.AdamW(P, lr=3e-4, fused=True)
    note("torch_AdamW_fused_ms", wall(o.step))


def opt_dion():
    import dion

    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 4096
    for kw in ({"use_triton": True}, {}):
        for cwd in (True,):
            try:
                P = params()
                o = dion.NorMuon(P, lr=0.02, weight_decay=0.1, cautious_wd=cwd, nesterov=True, **kw)
                note(f"dion_NorMuon_{kw}_ms", wall(o.step))
            except Exception as e:
                print("dion", kw, repr(e)[:300])


def opt_emerging():
    from emerging_optimizers.orthogonalized_optimizers import Muon

    P = params()
    o = Muon(P, lr=0.02)
    note("emerging_Muon_ms", wall(o.step))


def opt_heavyball():
    import heavyball

    names = [n for n in dir(heavyball) if "uon" in n]
    print(names)
    P = params()
    o = heavyball.Muon(P, lr=0.02)
    note("heavyball_Muon_ms", wall(o.step))


def e2e_fla():
    """The linear-attention LM of fla at the same width and depth (head size 32, dense), with AdamW."""
    from fla.models import GLAConfig, GLAForCausalLM

    cfg = GLAConfig(
        hidden_size=896,
        num_hidden_layers=32,
        vocab_size=65536,
        intermediate_size=2432,
        num_heads=28,
        expand_k=1.0,
        expand_v=1.0,
        fuse_linear_cross_entropy=True,
        fuse_cross_entropy=False,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    m = GLAForCausalLM(cfg).to(dev).bfloat16()
    n = sum(p.numel() for p in m.parameters())
    note("fla_gla_lm_params_M", round(n / 1e6))
    o = torch.optim.AdamW(m.parameters(), lr=3e-4, fused=True)
    x = torch.randint(0, 65536, (4, 4096), device=dev)

    def step():
        loss = m(input_ids=x, labels=x).loss
        loss.backward()
        o.step()
        o.zero_grad(set_to_none=True)

    t = time.time()
    step()
    torch.cuda.synchronize()
    note("fla_gla_lm_first_step_s", round(time.time() - t, 1))
    torch.cuda.reset_peak_memory_stats()
    ms = wall(step, 7)
    note("fla_gla_lm_train_tok_per_s", round(4 * 4096 / ms * 1e3))
    note("fla_gla_lm_step_ms", ms)
    note("fla_gla_lm_peak_GiB", round(torch.cuda.max_memory_allocated() / 2**30, 2))


if __name__ == "__main__":
    print(torch.__version__, triton.__version__, torch.cuda.get_device_name())
    want = sys.argv[1:]
    for f in (
        ceilings,
        fla_gla,
        fla_simple_gla,
        fla_gdr,
        fla_kda,
        sdpa,
        opt_sizes,
        opt_adamw,
        opt_torch_muon,
        opt_dion,
        opt_emerging,
        opt_heavyball,
        e2e_fla,
        eager_recurrence,
    ):
        if not want or f.__name__ in want:
            section(f)
            torch.cuda.empty_cache()
    print(json.dumps(out))
