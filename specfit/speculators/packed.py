"""A head's weights as the CPU kernels read them."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specfit.draft_vocab import DraftVocab
from specfit.speculators.eagle3 import Eagle3, RMSNorm
from specfit_kernels import int8
from specfit_kernels.cpu_layers import Rope
from specfit_kernels.cpu_weights import Activations, CpuWeight, pack
from specfit_serve.eagle3 import Eagle3Weights


@torch.no_grad()
def eagle3_weights(
    head: Eagle3,
    vocab: DraftVocab,
    embeddings: Float[Tensor, "vocab hidden"],
    *,
    in_int8: bool = False,
) -> Eagle3Weights:
    """Packs a head in bf16, which is how heads are saved, or in INT8.

    Args:
        head: on the CPU.
        vocab: what it drafts.
        embeddings: the target's.
        in_int8: half the bytes, and int8 activations: it drafts in half the time what it nearly
            always drafts.

    Raises:
        ValueError: its feed-forward layer is no SiLU one.
    """
    c, layer = head.config, head.layer
    if c.hidden_act != "silu":
        raise ValueError(f"hidden_act must be silu for the CPU kernels, got {c.hidden_act}")

    def packed(name: str, *linears: nn.Linear) -> CpuWeight:
        weights = [linear.weight.detach() for linear in linears]
        if in_int8:
            parts = [int8.quantize(weight, name=name) for weight in weights]
            return pack(parts, activations=Activations.int8, name=name)
        return pack([weight.bfloat16() for weight in weights], name=name)

    attention, mlp = layer.self_attn, layer.mlp
    positions = torch.arange(c.max_position_embeddings)
    half = c.head_dim // 2
    cosines, sines = (t[:, :half].float().contiguous() for t in head.rotation(positions))
    aux_norms = None
    if c.fc_norm:
        norms = [norm for norm in head.fc_norm if isinstance(norm, RMSNorm)]
        aux_norms = torch.stack([norm.weight.detach().float() for norm in norms])
    return Eagle3Weights(
        embeddings=embeddings,
        fuse=packed("fc", head.fc),
        qkv=packed("qkv", attention.q_proj, attention.k_proj, attention.v_proj),
        o=packed("o_proj", attention.o_proj),
        gate_up=packed("gate_up", mlp.gate_proj, mlp.up_proj),
        down=packed("down_proj", mlp.down_proj),
        head=packed("lm_head", head.lm_head),
        target_ids=vocab.target_ids.cpu(),
        embedding_norm=layer.input_layernorm.weight.detach().float(),
        state_norm=layer.hidden_norm.weight.detach().float(),
        post_attention_norm=layer.post_attention_layernorm.weight.detach().float(),
        norm=head.norm.weight.detach().float(),
        aux_norms=aux_norms,
        all_aux_norm=head.input_norm.weight.detach().float() if c.norm_before_fc else None,
        eps=c.rms_norm_eps,
        rope=Rope(cosines, sines),
        norm_before_residual=c.norm_before_residual,
        norm_output=c.norm_output,
    )
