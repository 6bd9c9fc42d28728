//! What each technique does to the numbers of a training step: whether it is safe to add to a program that trains.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::techniques::{name_of, stem_of};

/// How the weights after a training step differ from those of the same program without a technique.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NumericEffect {
    /// Every number has the same format, every update uses the same samples and the same rule. Sums may be taken in another
    /// order, as on another GPU.
    Same,
    /// Intermediate numbers have fewer bits. The optimizer's weights and states stay in single precision, every update
    /// uses the same samples and the same rule.
    Rounding,
    /// Weights or states have fewer bits, or updates follow another rule or use other samples: the trained model can be
    /// another one.
    Training,
}

impl NumericEffect {
    /// The strongest effect of some words of `techniques`; `has_batch_norm`: whether the model has layers whose result for
    /// one sample depends on the other samples of a micro-batch.
    pub(crate) fn of_words<'a>(words: impl Iterator<Item = &'a str>, has_batch_norm: bool) -> NumericEffect {
        let effects = words.map(|word| NumericEffect::of_word(word, has_batch_norm));
        effects.max().unwrap_or(NumericEffect::Same)
    }

    fn of_word(word: &str, has_batch_norm: bool) -> NumericEffect {
        match stem_of(name_of(word)) {
            // Copies and the same operations once more. `torch.utils.checkpoint` restores the state of the random numbers
            // (`preserve_rng_state`), so dropout is the same, too.
            "ckpt" | "ckpt_selective" | "offload" | "offload_optimizer" | "offload_params" | "offload_component" => {
                NumericEffect::Same
            }
            // The same values in the same or less memory.
            "inplace" | "empty_cache" | "gc" => NumericEffect::Same,
            // The same update, by other kernels; the fused one rounds fewer intermediate values.
            "foreach_off" => NumericEffect::Same,
            "fused" => NumericEffect::Rounding,
            // The same formulas by fused kernels, which round at other places (liger-kernel).
            "liger" => NumericEffect::Rounding,
            // Sums over parts of a batch, of rows, of columns.
            "chunked_loss" | "tensor_parallel" => NumericEffect::Same,
            // Gradients of micro-batches are summed. `torch.nn.BatchNorm2d` takes mean and variance of the micro-batch.
            "accum" | "pipeline" if !has_batch_norm => NumericEffect::Same,
            // TF32 keeps 10 bits of the mantissa of a product's operands (PyTorch, "CUDA semantics").
            "tf32" => NumericEffect::Rounding,
            // `torch.autocast` casts operands to 16 bits and leaves weights and states in fp32 (PyTorch, "Automatic Mixed
            // Precision package"). Master weights do the same for a 16-bit model (Micikevicius et al., "Mixed Precision
            // Training", 2018, section 3.1).
            "amp" | "fp16" | "bf16_master" => NumericEffect::Rounding,
            // paged_adam: the same rule with states in single precision, by a kernel of bitsandbytes.
            "paged_adam" => NumericEffect::Rounding,
            // - bf16_model: an update below half a unit in the last place of a 16-bit weight is lost (Zamirai et al.,
            //   "Revisiting BFloat16 Training", 2021). adam8bit, paged_adam8bit: so are changes of 8-bit states (Dettmers et al., "8-bit
            //   Optimizers via Block-wise Quantization", 2022).
            // - sgd: another rule. lora, qlora: other weights are trained; qlora: and the frozen ones have 4 bits.
            // - zero_fill: optimizers skip a weight whose gradient is None, and update one whose gradient is 0 by its momentum
            //   and weight decay (PyTorch, `Optimizer.zero_grad`).
            // - ddp, zero1, zero2, zero3, fsdp: every rank has its own batch, so an update uses the samples of all ranks.
            // - accum and pipeline with batch normalisation, and any word that is missing above.
            _ => NumericEffect::Training,
        }
    }
}

impl fmt::Display for NumericEffect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NumericEffect::Same => "keeps the numerics",
            NumericEffect::Rounding => "changes rounding",
            NumericEffect::Training => "can change the training result",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recipe;

    fn effect(model: &str, words: &str) -> NumericEffect {
        let words: Vec<String> = words.split(',').filter(|word| !word.is_empty()).map(str::to_owned).collect();
        Recipe::named(model).unwrap().numeric_effect(&words)
    }

    #[test]
    fn strongest_effect_counts() {
        for (words, expected) in [
            ("", NumericEffect::Same),
            ("ckpt2,offload,accum4,chunked_loss:4", NumericEffect::Same),
            ("ckpt,tf32", NumericEffect::Rounding),
            ("bf16_master,ckpt", NumericEffect::Rounding),
            ("amp,adam8bit", NumericEffect::Training),
            ("bf16_model", NumericEffect::Training),
            ("zero3:8", NumericEffect::Training),
            ("fsdp:8", NumericEffect::Training),
        ] {
            assert_eq!(effect("reference-gpt-163m", words), expected, "{words}");
        }
    }

    #[test]
    fn micro_batches_change_batch_norm() {
        assert_eq!(effect("reference-gpt-163m", "accum4"), NumericEffect::Same);
        assert_eq!(effect("resnet-50", "accum4"), NumericEffect::Training);
        assert_eq!(effect("resnet-50", "offload,tf32"), NumericEffect::Rounding);
    }
}
