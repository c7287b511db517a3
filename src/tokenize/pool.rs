//! The threads that make tokens. They are no cores' and are pinned nowhere.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::chat::Template;
use super::encode::Encoder;
use super::{ContentFormat, Desk, Done, Fate, Job, ModelFiles, Prompt, Unfit};
use crate::route::{self, Index};
use crate::shared::{Route, Shared, ToCore};

/// What makes a model's tokens.
struct Model {
    encoder: Encoder,
    template: Option<Template>,
}

/// The tokenizers by model.
pub struct Models {
    by_name: HashMap<String, Arc<Model>>,
    any: Option<Arc<Model>>,
    /// Requests for another model ask for an adapter; `None`: adapters are those that events name.
    base_model: Option<String>,
}

impl Models {
    /// Reads all files. `cache_bytes`: of tokens remembered, each model.
    ///
    /// # Errors
    /// A file is missing, or is not what it should be.
    pub fn open(
        files: &[ModelFiles],
        template: Option<&Path>,
        format: Option<ContentFormat>,
        base_model: Option<String>,
        cache_bytes: usize,
    ) -> Result<Models, String> {
        let mut models = Models {
            by_name: HashMap::new(),
            any: None,
            base_model,
        };
        for one in files {
            let folder = match one.path.is_dir() {
                true => Some(one.path.as_path()),
                false => one.path.parent(),
            };
            let json = match one.path.is_dir() {
                true => one.path.join("tokenizer.json"),
                false => one.path.clone(),
            };
            let model = Arc::new(Model {
                encoder: Encoder::open(&json, cache_bytes)?,
                template: Template::open(folder, template, format)?,
            });
            match &one.model {
                Some(name) => {
                    models.by_name.insert(name.clone(), model);
                }
                None => models.any = Some(model),
            }
        }
        Ok(models)
    }

    /// The tokens of a request as keys, and how many of them had to be made.
    fn prompt(
        &self,
        job: &Job,
        index: &Index,
        ids: &mut Vec<u32>,
    ) -> Result<(Prompt, usize), Unfit> {
        let named = route::as_str(&job.body, job.fields.model);
        let model = named.as_deref().and_then(|name| self.by_name.get(name));
        let model = model.or(self.any.as_ref()).ok_or(Unfit::Model)?;
        let (text, has_specials) = match job.route {
            Route::ChatCompletions => {
                let template = model.template.as_ref().ok_or(Unfit::Template)?;
                template.render(&job.body)?
            }
            Route::Completions | Route::Generate => text_of(job)?,
            _ => return Err(Unfit::Request),
        };
        let made = model.encoder.encode(&text, has_specials, ids);
        let made = made.map_err(|_| Unfit::Tokenizer)?;
        let mut chain = Vec::new();
        let base_model = self.base_model.as_deref();
        route::request_chain(
            index,
            base_model,
            ids,
            &job.body,
            &job.fields,
            named.as_deref(),
            &mut chain,
        );
        let count = ids.len() as u64;
        Ok((Prompt { count, chain }, made))
    }
}

/// A prompt that is one text, and whether special tokens are put round it (in vLLM they are, unless the request says otherwise).
fn text_of(job: &Job) -> Result<(String, bool), Unfit> {
    #[derive(serde::Deserialize)]
    struct Body {
        prompt: OneText,
        add_special_tokens: Option<bool>,
        truncate_prompt_tokens: Option<serde_json::Value>,
    }
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum OneText {
        Plain(String),
        Alone([String; 1]),
    }
    let body: Body = serde_json::from_slice(&job.body).map_err(|_| Unfit::Request)?;
    if body.truncate_prompt_tokens.is_some() {
        return Err(Unfit::Request);
    }
    let (OneText::Plain(text) | OneText::Alone([text])) = body.prompt;
    Ok((text, body.add_special_tokens.unwrap_or(true)))
}

/// The running threads. Dropping it ends them.
pub struct Pool {
    desk: Arc<Desk>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts as many threads as the desk has beds.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(desk: &Arc<Desk>, models: Models, shared: &Arc<Shared>) -> std::io::Result<Pool> {
        let models = Arc::new(models);
        let mut pool = Pool {
            desk: desk.clone(),
            threads: Vec::new(),
        };
        for number in 0..desk.thread_count() {
            let (desk, models, shared) = (desk.clone(), models.clone(), shared.clone());
            let thread = std::thread::Builder::new().name(format!("tokenizer-{number}"));
            let thread = thread.spawn(move || {
                let mut ids = Vec::new();
                while let Some(job) = desk.take(number) {
                    let index = shared.kv.as_ref().map(|kv| &kv.index);
                    let prompt = index.and_then(|i| work(&desk, &models, i, &job, &mut ids));
                    let done = Done {
                        client: job.client,
                        number: job.number,
                        prompt: prompt.map(Box::new),
                        body: job.body,
                    };
                    shared.cores[job.core].post(ToCore::Tokens(done));
                }
            })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }
}

fn work(
    desk: &Desk,
    models: &Models,
    index: &Index,
    job: &Job,
    ids: &mut Vec<u32>,
) -> Option<Prompt> {
    // A tokenizer is foreign code that is fed by clients: what it cannot take costs a request its exactness, not us a thread.
    let made = catch_unwind(AssertUnwindSafe(|| models.prompt(job, index, ids)));
    match made.unwrap_or(Err(Unfit::Tokenizer)) {
        Ok((prompt, made)) => {
            desk.count(Fate::Made);
            desk.count_tokens(made, ids.len().saturating_sub(made));
            Some(prompt)
        }
        Err(why) => {
            desk.count(Fate::Unfit(why));
            None
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.desk.close();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
