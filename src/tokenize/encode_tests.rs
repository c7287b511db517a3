use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::bert::BertNormalizer;
use tokenizers::normalizers::{Prepend, Replace, Sequence};
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{ModelWrapper, NormalizerWrapper, PreTokenizerWrapper};

use super::*;

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tokenizer");
const CORPUS: &str = include_str!("../../README.md");
const BYTES: usize = 1 << 20;

fn recorded() -> Tokenizer {
    Tokenizer::from_file(format!("{RECORDED}/tokenizer.json")).unwrap()
}

fn special(text: &str) -> AddedToken {
    AddedToken::from(text, true)
}

/// As Llama's first: white space is a letter, and a text's begin gets one.
fn with_white_letters(scheme: PrependScheme) -> Tokenizer {
    let mut trainer = BpeTrainerBuilder::new()
        .vocab_size(400)
        .show_progress(false)
        .build();
    let mut model = BPE::default();
    let words = CORPUS.split(' ').map(|word| format!("▁{word}"));
    tokenizers::Trainer::feed(&mut trainer, words, |word| Ok(vec![word.to_string()])).unwrap();
    tokenizers::Trainer::train(&trainer, &mut model).unwrap();
    let mut tokenizer = Tokenizer::new(ModelWrapper::from(model));
    match scheme {
        PrependScheme::Never => {
            let steps: Vec<NormalizerWrapper> = vec![
                Prepend::new("▁".to_string()).into(),
                Replace::new(" ", "▁").unwrap().into(),
            ];
            tokenizer.with_normalizer(Some(NormalizerWrapper::from(Sequence::new(steps))));
        }
        scheme => {
            let metaspace = Metaspace::new('▁', scheme, true);
            tokenizer.with_pre_tokenizer(Some(PreTokenizerWrapper::from(metaspace)));
        }
    }
    tokenizer.add_special_tokens(&[special("<s>"), special("</s>"), special("[INST]")]);
    tokenizer
}

fn of_word_pieces() -> Tokenizer {
    let words = [
        "[UNK]", "the", "work", "##er", "##s", "is", "it", "load", "##ed", ".",
    ];
    let vocabulary = words
        .iter()
        .zip(0..)
        .map(|(word, id)| (word.to_string(), id));
    let model = WordPiece::builder()
        .vocab(vocabulary.collect::<ahash::AHashMap<_, _>>())
        .unk_token("[UNK]".into());
    let mut tokenizer = Tokenizer::new(ModelWrapper::from(model.build().unwrap()));
    tokenizer.with_normalizer(Some(NormalizerWrapper::from(BertNormalizer::default())));
    tokenizer.with_pre_tokenizer(Some(PreTokenizerWrapper::from(BertPreTokenizer)));
    tokenizer.add_special_tokens(&[special("[CLS]"), special("[SEP]")]);
    tokenizer
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }
}

/// K1: of random conversations that grow, and share their begins, the ids are those of the whole, though most are remembered.
#[test]
fn remembered_ids_are_those_of_the_whole() {
    let tokenizers = [
        ("bytes", recorded()),
        ("first", with_white_letters(PrependScheme::First)),
        ("always", with_white_letters(PrependScheme::Always)),
        ("normalized", with_white_letters(PrependScheme::Never)),
        ("pieces", of_word_pieces()),
    ];
    let pieces = [
        "Which worker",
        " is it",
        "\n",
        "  ",
        "overloaded. ",
        "Köln",
        "👩‍🔬",
        "123 4567",
        "<|im_",
        "end|>",
        "<",
        "[",
        "s>",
        "<|im_start|>user\n",
        "<|im_end|>\n",
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "</tool_call> ",
        "<|begin|>",
        "<s>",
        "</s>",
        " </s> ",
        "[INST]",
        "[INST] ",
        "[CLS]",
        "[SEP]",
        "the workers",
        "x",
    ];
    for (name, tokenizer) in tokenizers {
        let (mut made, mut count) = (0, 0);
        for seed in 1..30 {
            let mut random = Random(seed);
            // So little memory that some is forgotten again.
            let encoder =
                Encoder::new(tokenizer.clone(), if seed < 20 { BYTES } else { 4_000 }).unwrap();
            let mut text = String::new();
            let mut ids = Vec::new();
            for _ in 0..40 {
                if random.below(12) == 0 {
                    text.truncate(text.char_indices().nth(20).map_or(0, |(at, _)| at));
                }
                for _ in 0..random.below(6) {
                    text.push_str(pieces[random.below(pieces.len())]);
                }
                let has_specials = random.below(2) == 0;
                let whole = tokenizer.encode(text.as_str(), has_specials).unwrap();
                made += encoder.encode(&text, has_specials, &mut ids).unwrap();
                count += ids.len();
                assert_eq!(ids, whole.get_ids(), "{name}, seed {seed}: {text:?}");
            }
        }
        // Its special tokens are among the pieces.
        if name == "bytes" {
            assert!(made * 2 < count, "{made} of {count} made anew");
        }
    }
}

/// The property above has to fail where a cut is no split.
#[test]
fn a_token_is_no_cut_if_another_one_can_lie_over_it() {
    let mut tokenizer = recorded();
    let clean = |tokenizer: &Tokenizer| {
        let mut clean = clean_tokens(tokenizer);
        clean.sort_unstable();
        clean
    };
    let all = [
        "</tool_call>",
        "<tool_call>",
        "<|begin|>",
        "<|im_end|>",
        "<|im_start|>",
    ];
    assert_eq!(clean(&tokenizer), all);
    tokenizer.add_special_tokens(&[special("a<|im_end|>"), special("x<tool")]);
    assert_eq!(
        clean(&tokenizer),
        [
            "</tool_call>",
            "<|begin|>",
            "<|im_start|>",
            "a<|im_end|>",
            "x<tool"
        ]
    );
    tokenizer.add_special_tokens(&[special("<|begin|>!").lstrip(true)]);
    let left = clean(&tokenizer);
    assert!(!left.contains(&"<|begin|>".to_string()) && left.contains(&"<|im_start|>".to_string()));
    tokenizer.add_special_tokens(&[special("alone").single_word(true)]);
    assert!(clean(&tokenizer).is_empty());
}

#[test]
fn a_files_limits_are_not_those_of_engines() {
    let mut tokenizer = recorded();
    let short = tokenizers::TruncationParams {
        max_length: 3,
        ..Default::default()
    };
    tokenizer.with_truncation(Some(short)).unwrap();
    tokenizer.with_padding(Some(Default::default()));
    let encoder = Encoder::new(tokenizer, BYTES).unwrap();
    let mut ids = Vec::new();
    encoder
        .encode("Which worker holds the longest prefix?", true, &mut ids)
        .unwrap();
    assert!(ids.len() > 5);
}

#[test]
fn memory_has_a_bound() {
    let encoder = Encoder::new(recorded(), 65_536).unwrap();
    let mut ids = Vec::new();
    for number in 0..3_000 {
        let text = format!("<|im_start|>user\n{number} is a number of many<|im_end|>");
        encoder.encode(&text, false, &mut ids).unwrap();
    }
    let known = encoder.known();
    let both = known.new.values().chain(known.old.values());
    let bytes: usize = both.map(|ids| size_of_val(&**ids) + SEGMENT_BYTES).sum();
    assert!(
        bytes <= 65_536 && known.new.len() + known.old.len() > 100,
        "{bytes}"
    );
}

/// The ids that the Python package makes of the same texts.
#[test]
fn texts_have_the_recorded_ids() {
    let cases: serde_json::Value =
        serde_json::from_str(include_str!("../../tests/tokenizer/cases.json")).unwrap();
    let encoder = Encoder::new(recorded(), BYTES).unwrap();
    let wanted = |case: &serde_json::Value| -> Vec<u32> {
        serde_json::from_value(case["ids"].clone()).unwrap()
    };
    let mut ids = Vec::new();
    for case in cases["plain"].as_array().unwrap() {
        encoder
            .encode(case["prompt"].as_str().unwrap(), true, &mut ids)
            .unwrap();
        assert_eq!(ids, wanted(case), "{}", case["prompt"]);
    }
    for case in cases["chat"].as_array().unwrap() {
        encoder
            .encode(case["text"].as_str().unwrap(), false, &mut ids)
            .unwrap();
        assert_eq!(ids, wanted(case), "{}", case["text"]);
    }
}
