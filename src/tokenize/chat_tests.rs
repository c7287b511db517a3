use super::*;

fn template(source: &str, format: Option<ContentFormat>) -> Template {
    let specials = json!({"bos_token": "<|begin|>", "eos_token": {"content": "<|im_end|>"}});
    Template::new(
        vec![(DEFAULT.into(), source.into())],
        specials_of(&specials),
        format,
    )
    .unwrap()
}

fn render(source: &str, body: Json) -> Result<String, Unfit> {
    let rendered = template(source, None).render(body.to_string().as_bytes());
    rendered.map(|(text, _)| text)
}

/// What jinja2, set up as transformers does it, made of the same requests (`tests/tokenizer/make.py`).
#[test]
fn requests_are_rendered_as_recorded() {
    let cases: Json =
        serde_json::from_str(include_str!("../../tests/tokenizer/cases.json")).unwrap();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tokenizer/");
    let cases = cases["chat"].as_array().unwrap();
    assert!(cases.len() >= 20);
    for case in cases {
        let source =
            std::fs::read_to_string(format!("{folder}{}", case["template"].as_str().unwrap()));
        let rendered = render(&source.unwrap(), case["request"].clone());
        assert_eq!(
            rendered.as_deref(),
            Ok(case["text"].as_str().unwrap()),
            "{}",
            case["request"]
        );
    }
}

#[test]
fn what_only_the_engine_knows_is_not_rendered() {
    let source = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let ask = json!([{"role": "user", "content": "x"}]);
    let refused = |more: Json| {
        let mut body = json!({"messages": ask});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        render(source, body).unwrap_err()
    };
    let image = json!([{"type": "image_url", "image_url": {"url": "http://x"}}]);
    let with_image = json!({"messages": [{"role": "user", "content": image}]});
    assert_eq!(refused(with_image), Unfit::Media);
    assert_eq!(refused(json!({"chat_template": "x"})), Unfit::Request);
    assert_eq!(
        refused(json!({"continue_final_message": true})),
        Unfit::Request
    );
    assert_eq!(
        refused(json!({"truncate_prompt_tokens": 5})),
        Unfit::Request
    );
    assert_eq!(
        refused(json!({"messages": [{"content": "no role"}]})),
        Unfit::Request
    );
    let failing = "{{ raise_exception('roles') }}";
    assert_eq!(
        render(failing, json!({"messages": ask})),
        Err(Unfit::Template)
    );
    // A list would print otherwise than in Python.
    assert_eq!(
        render("{{ messages }}", json!({"messages": ask})),
        Err(Unfit::Template)
    );
    assert_eq!(
        render("{{ x.y.z }}", json!({"messages": ask})),
        Err(Unfit::Template)
    );
}

#[test]
fn templates_that_go_over_contents_get_parts() {
    let goes_over = [
        "{% for part in message['content'] %}{% endfor %}",
        "{%- for c in m.content -%}{% endfor %}",
        "{% set content = message.content %}{% for item in content %}{% endfor %}",
        "{% set content = message[\"content\"] | list %}{%- for item in content if item -%}{% endfor %}",
    ];
    for source in goes_over {
        assert_eq!(ContentFormat::of(source), ContentFormat::OpenAi, "{source}");
    }
    let takes_texts = [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% set parts = message.content.split('x') %}{% for p in parts %}{% endfor %}",
        "for part in message.content",
    ];
    for source in takes_texts {
        assert_eq!(ContentFormat::of(source), ContentFormat::String, "{source}");
    }
}

#[test]
fn numbers_print_as_in_python() {
    let shown = [
        (1.0, "1.0"),
        (0.1, "0.1"),
        (-2.5, "-2.5"),
        (1e15, "1000000000000000.0"),
        (1e16, "1e+16"),
        (0.0001, "0.0001"),
        (0.00001, "1e-05"),
        (1.25e100, "1.25e+100"),
        (0.0, "0.0"),
    ];
    for (number, text) in shown {
        assert_eq!(number_as_python(number), text);
    }
}

#[test]
fn a_models_folder_names_its_template_and_tokens() {
    let folder = std::env::temp_dir().join(format!("corelane-chat-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let open = |given: Option<&Path>| Template::open(Some(&folder), given, None);
    assert!(open(None).unwrap().is_none());
    let config = json!({
        "bos_token": {"content": "<s>"},
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}plain"},
            {"name": "tool_use", "template": "with tools"},
        ],
    });
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    let text = |given: Option<&Path>, tools: Json| {
        let body = json!({"messages": [], "tools": tools}).to_string();
        open(given)
            .unwrap()
            .unwrap()
            .render(body.as_bytes())
            .unwrap()
            .0
    };
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    assert_eq!(text(None, Json::Null), "<s>plain");
    assert_eq!(text(None, tool.clone()), "with tools");
    let beside = folder.join("chat_template.jinja");
    std::fs::write(&beside, "{{ bos_token }}file").unwrap();
    assert_eq!(text(None, tool.clone()), "<s>file");
    let given = folder.join("given");
    std::fs::write(&given, "given {{ strftime_now('%Y') | length }}").unwrap();
    assert_eq!(text(Some(&given), tool), "given 4");
    std::fs::write(&given, "{% for %}").unwrap();
    assert!(open(Some(&given)).is_err());
    std::fs::remove_dir_all(&folder).unwrap();
}
