//! Models by the `config.json` of Hugging Face.
//!
//! A configuration becomes a recipe of the generator that runs the code of its `model_type`. Fields that are missing have
//! the defaults of transformers. What the generators do not model is refused: a setting that changes memory is never
//! ignored.

use std::path::Path;

use serde_json::{Map, Value};

use crate::{GeneratorEntry, Recipe, SettingPlace, WorkloadError, autograd};
use oomph_base::{did_you_mean_among, nearest, read_text_file};

/// The `model_type`s that are known.
const MODEL_TYPES: [&str; 12] =
    ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "gpt_neox", "gpt2", "mixtral", "bert", "vit", "t5"];

/// Settings that change memory and that no generator has: the model types (none: all), the field, and the value, as JSON,
/// that it may have. Taken from the fields that the modeling files of transformers 5.22 read.
const UNMODELLED: &[(&[&str], &str, &str)] = &[
    (&[], "quantization_config", "null"),
    (&[], "attn_implementation", "\"sdpa\""),
    (&[], "_attn_implementation", "\"sdpa\""),
    (&[], "output_attentions", "false"),
    (&[], "output_hidden_states", "false"),
    (&[], "chunk_size_feed_forward", "0"),
    (&[], "pruned_heads", "{}"),
    (&[], "is_decoder", "false"),
    (&[], "add_cross_attention", "false"),
    (&["llama", "mistral", "mixtral", "qwen3", "gemma"], "attention_bias", "false"),
    (&["llama", "mistral", "mixtral", "qwen3", "gemma"], "mlp_bias", "false"),
    (&["llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "phi", "gpt_neox"], "attention_dropout", "0"),
    (&["qwen2", "qwen3"], "use_sliding_window", "false"),
    (&["gemma"], "use_bidirectional_attention", "false"),
    (&["phi"], "embd_pdrop", "0"),
    (&["phi"], "qk_layernorm", "false"),
    (&["gpt_neox"], "attention_bias", "true"),
    (&["gpt_neox"], "hidden_dropout", "0"),
    (&["gpt_neox"], "use_parallel_residual", "true"),
    (&["mixtral"], "output_router_logits", "false"),
    (&["mixtral"], "router_jitter_noise", "0"),
    (&["bert"], "tie_word_embeddings", "true"),
    (&["vit"], "qkv_bias", "true"),
    (&["vit"], "hidden_dropout_prob", "0"),
    (&["vit"], "attention_probs_dropout_prob", "0"),
];

/// A configuration with tokens of this number at most is trained with all of them.
const LONGEST_DEFAULT_CONTEXT: u64 = 2048;

impl Recipe {
    /// Whether a file is the configuration of a model.
    #[must_use]
    pub fn is_config(path: &Path) -> bool {
        path.extension().is_some_and(|extension| extension == "json")
            && read_text_file(path).is_ok_and(
                |text| matches!(serde_json::from_str(&text), Ok(Value::Object(map)) if map.contains_key("model_type")),
            )
    }

    /// The recipe of a model, from its `config.json`: batch 1, and sequences as long as the model takes them, 2048 tokens at
    /// most.
    pub fn from_config(path: &Path) -> Result<Recipe, WorkloadError> {
        let text = read_text_file(path).map_err(|source| WorkloadError::Io { path: path.to_owned(), source })?;
        let file = path.display().to_string();
        let config = ModelConfig::parse(&file, &text)?;
        let settings = config.settings()?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        // Files of the model hub are all called config.json: the folder has the name.
        let folder = path.parent().and_then(Path::file_name).map(|name| name.to_string_lossy());
        let name = match (stem.as_ref(), folder) {
            ("config", Some(folder)) => folder.into_owned(),
            _ => stem.into_owned(),
        };
        Ok(Recipe::of_settings(name, config.generator(), &file, settings))
    }
}

fn yes_or_no(flag: bool) -> String {
    if flag { "yes" } else { "no" }.to_owned()
}

/// A configuration, and where it is.
struct ModelConfig<'a> {
    file: &'a str,
    text: &'a str,
    fields: Map<String, Value>,
    model_type: &'static str,
}

impl ModelConfig<'_> {
    fn parse<'a>(file: &'a str, text: &'a str) -> Result<ModelConfig<'a>, WorkloadError> {
        let at = |offset, reason: String| WorkloadError::Invalid {
            place: SettingPlace::in_file(file, text, offset),
            reason,
        };
        let fields: Map<String, Value> = serde_json::from_str(text).map_err(|error| {
            let offset = text.lines().take(error.line().saturating_sub(1)).map(|line| line.len() + 1).sum::<usize>();
            at(offset + error.column().saturating_sub(1), format!("not a configuration: {error}"))
        })?;
        let wanted = fields.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let Some(model_type) = MODEL_TYPES.into_iter().find(|known| *known == wanted) else {
            let near = nearest(wanted, MODEL_TYPES);
            let hint = did_you_mean_among(near.as_deref(), MODEL_TYPES);
            let reason =
                format!("model_type '{wanted}' is not known{hint}; `oomph rehearse` runs any model's own code");
            return Err(at(text.find("\"model_type\"").unwrap_or(0), reason));
        };
        Ok(ModelConfig { file, text, fields, model_type })
    }

    /// The generator that runs its code.
    fn generator(&self) -> &'static GeneratorEntry {
        match self.model_type {
            "bert" => &autograd::ENCODER,
            "vit" => &autograd::VISION_ENCODER,
            "t5" => &autograd::ENCODER_DECODER,
            _ => &autograd::DECODER,
        }
    }

    /// The parameters of the generator.
    fn settings(&self) -> Result<Vec<(&'static str, String)>, WorkloadError> {
        self.refuse_unmodelled()?;
        let settings = match self.model_type {
            "bert" => self.encoder_settings()?,
            "vit" => self.vision_settings()?,
            "t5" => self.encoder_decoder_settings()?,
            _ => self.decoder_settings()?,
        };
        let batch = ("batch", "1".to_owned());
        Ok([batch].into_iter().chain(settings).collect())
    }

    fn encoder_settings(&self) -> Result<Vec<(&'static str, String)>, WorkloadError> {
        self.expect_activation("hidden_act", &["gelu"], "gelu")?;
        let positions = self.count(&["max_position_embeddings"], Some(512))?;
        Ok(vec![
            ("layers", self.count(&["num_hidden_layers"], Some(12))?.to_string()),
            ("width", self.count(&["hidden_size"], Some(768))?.to_string()),
            ("heads", self.count(&["num_attention_heads"], Some(12))?.to_string()),
            ("ffn", self.count(&["intermediate_size"], Some(3072))?.to_string()),
            ("vocab", self.count(&["vocab_size"], Some(30522))?.to_string()),
            ("positions", positions.to_string()),
            ("context", positions.min(LONGEST_DEFAULT_CONTEXT).to_string()),
            ("token_types", self.count(&["type_vocab_size"], Some(2))?.to_string()),
            ("dropout", self.drops(&["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.1)?),
        ])
    }

    fn vision_settings(&self) -> Result<Vec<(&'static str, String)>, WorkloadError> {
        self.expect_activation("hidden_act", &["gelu"], "gelu")?;
        let labels = self.fields.get("id2label").and_then(Value::as_object).map(|labels| labels.len() as u64);
        let classes = self.count(&["num_labels"], Some(labels.unwrap_or(2)))?;
        Ok(vec![
            ("layers", self.count(&["num_hidden_layers"], Some(12))?.to_string()),
            ("width", self.count(&["hidden_size"], Some(768))?.to_string()),
            ("heads", self.count(&["num_attention_heads"], Some(12))?.to_string()),
            ("ffn", self.count(&["intermediate_size"], Some(3072))?.to_string()),
            ("image", self.count(&["image_size"], Some(224))?.to_string()),
            ("patch", self.count(&["patch_size"], Some(16))?.to_string()),
            ("channels", self.count(&["num_channels"], Some(3))?.to_string()),
            ("classes", classes.to_string()),
        ])
    }

    fn encoder_decoder_settings(&self) -> Result<Vec<(&'static str, String)>, WorkloadError> {
        let gated = match self.first(&["feed_forward_proj"]).map(|(_, value)| value.as_str().unwrap_or_default()) {
            None | Some("relu") => "no",
            Some("gated-gelu") => "yes",
            Some(other) => return Err(self.refuse("feed_forward_proj", format!("'{other}' is not modelled"))),
        };
        let layers = self.count(&["num_layers"], Some(6))?;
        Ok(vec![
            ("layers", layers.to_string()),
            ("decoder_layers", self.count(&["num_decoder_layers"], Some(layers))?.to_string()),
            ("width", self.count(&["d_model"], Some(512))?.to_string()),
            ("heads", self.count(&["num_heads"], Some(8))?.to_string()),
            ("head_width", self.count(&["d_kv"], Some(64))?.to_string()),
            ("ffn", self.count(&["d_ff"], Some(2048))?.to_string()),
            ("vocab", self.count(&["vocab_size"], Some(32128))?.to_string()),
            ("context", self.count(&["n_positions"], Some(512))?.min(LONGEST_DEFAULT_CONTEXT).to_string()),
            ("buckets", self.count(&["relative_attention_num_buckets"], Some(32))?.to_string()),
            ("gated", gated.to_owned()),
            ("tied", yes_or_no(self.flag("tie_word_embeddings", true)?)),
            ("dropout", self.drops(&["dropout_rate"], 0.1)?),
        ])
    }

    fn decoder_settings(&self) -> Result<Vec<(&'static str, String)>, WorkloadError> {
        self.expect_decoder_activation()?;
        let width = self.count(&["hidden_size", "n_embd"], None)?;
        let heads = self.count(&["num_attention_heads", "n_head"], None)?;
        if heads == 0 {
            return Err(self.refuse("num_attention_heads", "must not be 0".to_owned()));
        }
        let head_width = self.count(&["head_dim"], Some(self.default_head_width(width, heads)))?;
        let ffn = self.count(&["intermediate_size", "n_inner"], Some(width.saturating_mul(4)))?;
        let positions = self.count(&["max_position_embeddings", "n_positions"], Some(2048))?;
        let is_tied = self.flag("tie_word_embeddings", matches!(self.model_type, "gemma" | "gpt2"))?;
        let mut settings = vec![
            ("family", self.model_type.to_owned()),
            ("layers", self.count(&["num_hidden_layers", "n_layer"], None)?.to_string()),
            ("width", width.to_string()),
            ("heads", heads.to_string()),
            ("kv_heads", self.count(&["num_key_value_heads"], Some(self.default_key_value_heads(heads)))?.to_string()),
            ("head_width", head_width.to_string()),
            ("ffn", ffn.to_string()),
            ("vocab", self.count(&["vocab_size"], None)?.to_string()),
            ("context", positions.min(LONGEST_DEFAULT_CONTEXT).to_string()),
            ("tied", yes_or_no(is_tied)),
        ];
        let rotary = match self.model_type {
            "phi" => self.share("partial_rotary_factor", 0.5)?,
            "gpt_neox" => self.share("rotary_pct", 0.25)?,
            _ => 1.0,
        };
        settings.push(("rotary_width", ((head_width as f64 * rotary) as u64).to_string()));
        match self.model_type {
            "gpt2" => {
                settings.push(("positions", positions.to_string()));
                settings.push(("dropout", self.drops(&["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.1)?));
            }
            "phi" => settings.push(("dropout", self.drops(&["resid_pdrop"], 0.0)?)),
            "mistral" | "mixtral" => {
                // Mistral has a window unless it is null; Mixtral has none unless it is set.
                let has_default = self.model_type == "mistral" && !self.fields.contains_key("sliding_window");
                let window = self.count(&["sliding_window"], Some(if has_default { 4096 } else { 0 }))?;
                settings.push(("window", window.to_string()));
            }
            _ => {}
        }
        if self.model_type == "mixtral" {
            settings.push(("local_experts", self.count(&["num_local_experts"], Some(8))?.to_string()));
            settings.push(("experts_per_token", self.count(&["num_experts_per_tok"], Some(2))?.to_string()));
        }
        Ok(settings)
    }

    /// Whether numbers are dropped: everywhere or nowhere.
    fn drops(&self, names: &[&str], default: f64) -> Result<String, WorkloadError> {
        let is_set = |name: &&str| Ok(self.share(name, default)? > 0.0);
        let set: Vec<bool> = names.iter().map(is_set).collect::<Result<_, WorkloadError>>()?;
        match set.iter().all(|one| *one == set[0]) {
            true => Ok(yes_or_no(set[0])),
            false => Err(self.refuse(names[0], format!("and {} are not all 0 or all above it", names[1..].join(", ")))),
        }
    }

    /// Activations that are other kernels need other memory.
    fn expect_activation(&self, name: &str, known: &[&str], default: &str) -> Result<(), WorkloadError> {
        let value = self.first(&[name]).map_or(default, |(_, value)| value.as_str().unwrap_or_default());
        match known.contains(&value) {
            true => Ok(()),
            false => Err(self.refuse(name, format!("'{value}' is not modelled for {}", self.model_type))),
        }
    }

    /// The default of transformers where the configuration does not say it.
    fn default_head_width(&self, width: u64, heads: u64) -> u64 {
        match self.model_type {
            "gemma" => 256,
            "qwen3" => 128,
            _ => width / heads,
        }
    }

    fn default_key_value_heads(&self, heads: u64) -> u64 {
        match self.model_type {
            "mistral" | "mixtral" => 8,
            "qwen2" | "qwen3" => 32,
            "gemma" => 16,
            _ => heads,
        }
    }

    /// A setting that changes memory is never ignored.
    fn refuse_unmodelled(&self) -> Result<(), WorkloadError> {
        for &(model_types, name, modelled) in UNMODELLED {
            let Some((_, value)) = self.first(&[name]) else { continue };
            let shown = value.to_string();
            let is_modelled = shown == modelled || modelled == "0" && value.as_f64() == Some(0.0);
            let concerns = model_types.is_empty() || model_types.contains(&self.model_type);
            if concerns && !is_modelled {
                let shown = if value.is_object() || value.is_array() { String::new() } else { format!("{shown} ") };
                return Err(self.refuse_for_rehearsal(name, &format!("{shown}is not modelled")));
            }
        }
        let layers = self.first(&["layer_types"]).and_then(|(_, value)| value.as_array());
        if layers.is_some_and(|layers| layers.iter().any(|layer| layer != "full_attention")) {
            return Err(self.refuse_for_rehearsal("layer_types", "other than full_attention are not modelled"));
        }
        self.expect_architecture()
    }

    /// Other heads than the usual one take other memory.
    fn expect_architecture(&self) -> Result<(), WorkloadError> {
        let named = self.first(&["architectures"]).and_then(|(_, value)| value.as_array()?.first()?.as_str());
        let known: &[&str] = match self.model_type {
            "bert" => &["BertForMaskedLM"],
            "vit" => &["ViTForImageClassification"],
            "t5" => &["T5ForConditionalGeneration", "T5WithLMHeadModel"],
            "gpt2" => &["GPT2LMHeadModel"],
            _ => &["ForCausalLM"],
        };
        match named {
            Some(class) if !known.iter().any(|known| class.ends_with(known)) => {
                let reason = format!("'{class}' is not modelled, only {}: without this line that is taken", known[0]);
                Err(self.refuse_for_rehearsal("architectures", &reason))
            }
            _ => Ok(()),
        }
    }

    fn expect_decoder_activation(&self) -> Result<(), WorkloadError> {
        match self.model_type {
            "gpt2" => self.expect_activation("activation_function", &["gelu_new"], "gelu_new")?,
            "phi" => self.expect_activation("hidden_act", &["gelu_new"], "gelu_new")?,
            "gpt_neox" => self.expect_activation("hidden_act", &["gelu"], "gelu")?,
            "gemma" => self.expect_activation(
                "hidden_activation",
                &["gelu_pytorch_tanh", "gelu", "silu"],
                "gelu_pytorch_tanh",
            )?,
            _ => self.expect_activation("hidden_act", &["silu", "gelu", "gelu_pytorch_tanh"], "silu")?,
        }
        Ok(())
    }

    /// The first of these fields that is set, as a count.
    fn count(&self, names: &[&str], default: Option<u64>) -> Result<u64, WorkloadError> {
        let Some((name, value)) = self.first(names) else {
            return default.ok_or_else(|| self.refuse(names[0], "is missing".to_owned()));
        };
        value.as_u64().ok_or_else(|| self.refuse(name, format!("takes a whole number, not {value}")))
    }

    fn share(&self, name: &str, default: f64) -> Result<f64, WorkloadError> {
        // Newer configurations have those of the rotation in a table of their own.
        let nested = self.fields.get("rope_parameters").and_then(|table| table.get(name));
        match self.first(&[name]).map(|(_, value)| value).or(nested) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| self.refuse(name, format!("takes a number, not {value}"))),
        }
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool, WorkloadError> {
        match self.first(&[name]) {
            None => Ok(default),
            Some((_, value)) => {
                value.as_bool().ok_or_else(|| self.refuse(name, format!("takes true or false, not {value}")))
            }
        }
    }

    /// The first of these fields that is set and not null.
    fn first<'b>(&'b self, names: &[&'b str]) -> Option<(&'b str, &'b Value)> {
        names.iter().find_map(|name| Some((*name, self.fields.get(*name).filter(|value| !value.is_null())?)))
    }

    fn refuse_for_rehearsal(&self, name: &str, reason: &str) -> WorkloadError {
        self.refuse(name, format!("{reason}; `oomph rehearse` runs the model's own code"))
    }

    fn refuse(&self, name: &str, reason: String) -> WorkloadError {
        let offset = self.text.find(&format!("\"{name}\"")).unwrap_or(0);
        WorkloadError::Invalid {
            place: SettingPlace::in_file(self.file, self.text, offset),
            reason: format!("'{name}' {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn recipe(text: &str) -> Result<Recipe, WorkloadError> {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("some-model");
        fs::create_dir(&model).unwrap();
        let path = model.join("config.json");
        fs::write(&path, text).unwrap();
        assert!(Recipe::is_config(&path) || !text.contains("model_type"));
        Recipe::from_config(&path)
    }

    /// The published configurations of real models, and the published number of their parameters.
    const PUBLISHED: [(&str, u64); 16] = [
        (
            r#"{"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}"#,
            124_439_808,
        ),
        (
            r#"{"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 1024, "n_layer": 24, "n_head": 16}"#,
            354_823_168,
        ),
        (
            r#"{"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "intermediate_size": 3072, "rotary_pct": 0.25, "max_position_embeddings": 2048}"#,
            162_322_944,
        ),
        (
            r#"{"model_type": "phi", "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
             "num_attention_heads": 32, "partial_rotary_factor": 0.5, "max_position_embeddings": 2048}"#,
            1_418_270_720,
        ),
        (
            r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
             "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": true}"#,
            1_235_814_400,
        ),
        (
            r#"{"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
             "num_attention_heads": 32}"#,
            6_738_415_616,
        ),
        (
            r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 8}"#,
            8_030_261_248,
        ),
        (
            r#"{"model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
             "num_attention_heads": 32, "num_key_value_heads": 4}"#,
            1_100_048_384,
        ),
        (
            r#"{"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 8}"#,
            7_241_732_096,
        ),
        (
            r#"{"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": true}"#,
            494_032_768,
        ),
        (
            r#"{"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": true}"#,
            596_049_920,
        ),
        (
            r#"{"model_type": "gemma", "vocab_size": 256000, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
             "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}"#,
            2_506_172_416,
        ),
        (
            r#"{"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}"#,
            46_702_792_704,
        ),
        // With its head for masked tokens, without pooler.
        (r#"{"model_type": "bert"}"#, 109_514_298),
        (r#"{"model_type": "vit", "num_labels": 1000}"#, 86_567_656),
        (r#"{"model_type": "t5"}"#, 60_506_624),
    ];

    #[test]
    fn parameters_are_counted_as_published() {
        for (text, parameters) in PUBLISHED {
            let recipe = recipe(text).unwrap();
            assert_eq!(recipe.name, "some-model");
            assert_eq!(recipe.weight_count().unwrap(), Some(parameters), "{text}");
            recipe.workload().unwrap();
        }
    }

    #[test]
    fn what_is_not_modelled_is_refused_at_its_line() {
        let refused = |text: &str| recipe(text).err().unwrap().to_string();
        let error = refused("{\n \"model_type\": \"qwen22\"}");
        assert!(error.contains("config.json:2:2: model_type 'qwen22' is not known; did you mean 'qwen2'?"), "{error}");
        assert!(error.ends_with("`oomph rehearse` runs any model's own code"), "{error}");
        let error = refused("{\"model_type\": \"llama\",\n \"num_attention_heads\": 8}");
        assert!(error.ends_with("'hidden_size' is missing"), "{error}");
        let error = refused("{\"model_type\": \"llama\", \"hidden_size\": 64,\n\"attention_bias\": true}");
        assert!(error.contains("config.json:2:1: 'attention_bias' true is not modelled"), "{error}");
        let error = refused("{\"model_type\": \"llama\", \"hidden_size\": \"wide\"}");
        assert!(error.ends_with("'hidden_size' takes a whole number, not \"wide\""), "{error}");
        assert!(refused("{").contains("not a configuration"));
        for (model_type, setting, reason) in [
            ("llama", "\"quantization_config\": {\"bits\": 4}", "'quantization_config' is not modelled"),
            ("mistral", "\"attn_implementation\": \"eager\"", "'attn_implementation' \"eager\" is not modelled"),
            ("qwen2", "\"use_sliding_window\": true", "'use_sliding_window' true is not modelled"),
            ("qwen3", "\"layer_types\": [\"sliding_attention\"]", "'layer_types' other than full_attention"),
            ("phi", "\"qk_layernorm\": true", "'qk_layernorm' true is not modelled"),
            ("gpt_neox", "\"attention_bias\": false", "'attention_bias' false is not modelled"),
            ("mixtral", "\"router_jitter_noise\": 0.1", "'router_jitter_noise' 0.1 is not modelled"),
            ("bert", "\"is_decoder\": true", "'is_decoder' true is not modelled"),
            ("vit", "\"hidden_dropout_prob\": 0.1", "'hidden_dropout_prob' 0.1 is not modelled"),
            ("gpt2", "\"add_cross_attention\": true", "'add_cross_attention' true is not modelled"),
            (
                "bert",
                "\"architectures\": [\"BertForQuestionAnswering\"]",
                "'architectures' 'BertForQuestionAnswering' is not modelled, only BertForMaskedLM",
            ),
        ] {
            let error = refused(&format!("{{\"model_type\": \"{model_type}\",\n {setting}}}"));
            assert!(error.contains(&format!("config.json:2:2: {reason}")), "{error}");
            assert!(error.ends_with("`oomph rehearse` runs the model's own code"), "{error}");
        }
        let plain = "{\"model_type\": \"bert\", \"architectures\": [\"BertForMaskedLM\"], \"chunk_size_feed_forward\": 0, \
                     \"quantization_config\": null}";
        assert!(recipe(plain).is_ok());
        let odd = recipe("{\"model_type\": \"bert\", \"hidden_size\": 1000, \"num_attention_heads\": 10}").unwrap();
        let error = odd.clone().with("techniques", "amp").workload().err().unwrap().to_string();
        assert!(error.contains("heads of 100 numbers are not modelled: not a multiple of 8"), "{error}");
        assert!(odd.workload().is_ok());
    }
}
