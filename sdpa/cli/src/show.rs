//! `show`: draws the modified scores of a head, and the keys that masks keep, as a picture.

mod color;
mod field;
mod figure;
mod preview;
mod raster;
mod scene;
mod svg;

use crate::args::ShowArgs;
use crate::exit::{Answer, Failure, Mistakes, Outcome};
use crate::names;
use crate::operands::{self, Operands};
use crate::progress::Progress;
use crate::request::{Request, Wanted};
use crate::save::Destination;
use crate::table::{Table, list};
use field::{Curve, Field, Odd, View, range};
use figure::{Titles, short};
use scene::Scene;
use serde::Serialize;
use std::io::Write;
use std::path::Path;

/// An image format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Svg,
    Png,
}

fn format(path: &Path) -> Result<Format, String> {
    match path.extension().and_then(|e| e.to_str()) {
        Some("svg") => Ok(Format::Svg),
        Some("png") => Ok(Format::Png),
        Some(_) | None => Err("must end in .svg or .png".to_owned()),
    }
}

/// The parsed arguments.
struct Order {
    request: Request,
    view: View,
    format: Format,
    destination: Destination,
}

/// Parses an index below an extent.
fn below(text: Option<&str>, extent: Option<i64>, what: &str) -> Result<i64, String> {
    let index = text.map_or(Ok(0), names::index)?;
    match extent {
        Some(extent) if index >= extent => Err(format!("got {index}, expected less than {extent}, the number of {what}")),
        Some(_) | None => Ok(index),
    }
}

impl Order {
    fn read(args: &ShowArgs) -> Result<Order, Failure> {
        let mut mistakes = Mistakes::default();
        let request = Request::read(&args.problem, &Wanted::default(), &mut mistakes);
        let empty = request.as_ref().is_some_and(|request| request.problem.is_empty());
        if empty {
            mistakes.add("shape", "got no batch entry, query or key; a picture needs at least one of each");
        }
        // An empty extent was reported above. Ignore the request then: any --head or --batch would be out of range.
        let request = request.filter(|_| !empty);
        if let Some(request) = &request {
            mistakes.take("memory", operands::fits(request, false, 0));
        }
        let extents = request.as_ref().map(|r| r.problem.extents());
        let head = mistakes.take("--head", below(args.head.as_deref(), extents.map(|e| e[1]), "query heads"));
        let batch = mistakes.take("--batch", below(args.batch.as_deref(), extents.map(|e| e[0]), "batch entries"));
        let given = args.score.as_deref().map(|text| mistakes.take("--score", names::scale(text)).map(f64::from));
        let score = match given {
            Some(given) => given.map(Some),
            None => Some(args.problem.input.is_none().then_some(0.0)),
        };
        let path = args.output.as_deref().unwrap_or(Path::new("score_mod.svg"));
        let about = || format!("--output {}", path.display());
        let format = mistakes.take(about(), format(path));
        let destination = mistakes.take(about(), Destination::new(path, args.problem.input.as_deref()));
        let view = head.zip(batch).zip(score).map(|((head, batch), score)| View { batch, head, score });
        let order = request.zip(view).zip(format).zip(destination);
        mistakes.finish(order.map(|(((request, view), format), destination)| Order { request, view, format, destination }))
    }
}

/// The smallest and the largest value.
#[derive(Serialize)]
struct Range {
    min: f64,
    max: f64,
}

impl Range {
    fn of(numbers: impl Iterator<Item = f64>) -> Option<Range> {
        range(numbers).map(|[min, max]| Range { min, max })
    }
}

/// Unmasked scores that are infinite or NaN.
#[derive(Serialize)]
struct NotFinite {
    not_a_number: u64,
    infinite: u64,
    minus_infinite: u64,
    /// Number of examined pairs.
    of: u64,
    /// Query and key.
    first: [usize; 2],
}

impl NotFinite {
    fn new(field: &Field) -> Option<NotFinite> {
        let [not_a_number, infinite, minus_infinite] = field.odd_pairs;
        Some(NotFinite { not_a_number, infinite, minus_infinite, of: field.looked, first: field.first_odd? })
    }

    fn text(&self) -> String {
        let counts = [(Odd::NotANumber, self.not_a_number), (Odd::Infinite, self.infinite), (Odd::MinusInfinite, self.minus_infinite)];
        let counts = counts.into_iter().filter(|(_, n)| *n > 0).map(|(odd, n)| format!("{n} {}", odd.said()));
        let [q, k] = self.first;
        format!("{} of the {} pairs that were looked at; the first at query {q}, key {k}", list(&counts.collect::<Vec<_>>()), self.of)
    }
}

/// The JSON of `show`.
#[derive(Serialize)]
struct Told {
    output: String,
    score_mods: Vec<String>,
    masks: Vec<String>,
    batch: i64,
    head: i64,
    /// `None` if the scores are those of the input.
    score: Option<f64>,
    queries: i64,
    keys: i64,
    /// Rows and columns.
    cells: [usize; 2],
    /// The fraction of pairs that masks keep.
    kept: f64,
    modified_score: Option<Range>,
    /// Unmasked scores that are infinite or NaN, among the examined pairs.
    not_finite: Option<NotFinite>,
    curve_value: Option<Range>,
    curve_derivative: Option<Range>,
    #[serde(skip)]
    preview: String,
}

/// Runs the command `show` and returns its output.
pub(crate) fn run(args: &ShowArgs, json: bool) -> Result<Answer, Failure> {
    let order = Order::read(args)?;
    let progress = Progress::new(json);
    let Order { request, view, .. } = &order;
    let operands = Operands::load(request, 0, progress)?;
    let (field, curve) = {
        let _step = progress.spinner("computing");
        (Field::new(request, &operands, *view), Curve::new(request, &operands, *view))
    };
    let scene = figure::draw(&titles(request, *view), &field, &curve);
    let written = write(&order, &scene);
    written.map_err(|e| Failure::environment(order.destination.path.display(), format!("cannot be written: {e}")))?;
    let told = tell(&order, &field, &curve);
    Answer::new(json, &told, || told.text(), Outcome::Good)
}

fn titles(request: &Request, view: View) -> Titles {
    let p = &request.problem;
    let scalars = request.params.iter().filter_map(|planned| Some(format!(", {} = {}", planned.declared.name, planned.scalar()?)));
    Titles {
        score_mods: field::names(&request.spec.score_mods),
        masks: request.masks(),
        extents: [p.seq_q(), p.seq_kv()],
        view: format!(
            "batch {} of {}, head {} of {}, {} queries, {} keys{}",
            view.batch,
            p.batch(),
            view.head,
            p.heads_q(),
            p.seq_q(),
            p.seq_kv(),
            scalars.collect::<String>()
        ),
        score: view.score.map_or_else(|| "scores of the input".to_owned(), |score| format!("score {} everywhere", short(score))),
    }
}

fn write(order: &Order, scene: &Scene) -> Result<(), String> {
    match order.format {
        Format::Svg => {
            let text = svg::render(scene).map_err(|e| e.to_string())?;
            order.destination.write_with(|out| out.write_all(text.as_bytes()))
        }
        Format::Png => order.destination.write_with(|out| raster::render(scene, out).map_err(std::io::Error::other)),
    }
}

fn tell(order: &Order, field: &Field, curve: &Curve) -> Told {
    let Order { request, view, .. } = order;
    Told {
        output: order.destination.path.display().to_string(),
        score_mods: field::names(&request.spec.score_mods),
        masks: request.masks(),
        batch: view.batch,
        head: view.head,
        score: view.score,
        queries: request.problem.seq_q(),
        keys: request.problem.seq_kv(),
        cells: [field.rows, field.columns],
        kept: field.kept.iter().sum::<f64>() / field.kept.len().max(1) as f64,
        modified_score: Range::of(field.values.iter().flatten().copied()),
        not_finite: NotFinite::new(field),
        curve_value: Range::of(curve.values.iter().map(|p| p[1])),
        curve_derivative: Range::of(curve.slopes.iter().map(|p| p[1])),
        preview: format!("{}{}", preview::render(field), preview::legend(field)),
    }
}

impl Told {
    fn text(&self) -> String {
        let mut table = Table::default();
        let line = |range: &Option<Range>| range.iter().map(|r| format!("{} to {}", short(r.min), short(r.max))).collect::<Vec<_>>();
        table.row("output", self.output.clone());
        table.row("score_mod", list(&self.score_mods));
        table.row("masks", list(&self.masks));
        table.row("kept", format!("{:.1} % of {} x {}", self.kept * 100.0, self.queries, self.keys));
        table.rows("scores", line(&self.modified_score));
        table.rows("not finite", self.not_finite.iter().map(NotFinite::text));
        table.rows("derivative", line(&self.curve_derivative));
        table.row("", self.preview.clone());
        table.render()
    }
}
