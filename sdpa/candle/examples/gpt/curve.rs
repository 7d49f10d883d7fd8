//! Draws the loss curve as SVG.

use std::fmt::Write;

/// Returns a plot of the loss of each step and its mean over the last twenty steps, in nats, from 0 upwards.
pub(crate) fn svg(losses: &[f32]) -> String {
    let (width, height, left, bottom) = (720., 300., 50., 40.);
    let most = losses.iter().copied().fold(1f32, f32::max).ceil();
    let steps = losses.len().max(2) - 1;
    let x = |step: usize| left + (width - left - 10.) * step as f32 / steps as f32;
    let y = |loss: f32| 10. + (height - bottom - 10.) * (1. - loss / most);
    let line = |of: &dyn Fn(usize) -> f32| {
        (0..losses.len()).fold(String::new(), |mut points, step| {
            // Writing to a string does not fail.
            let _ = write!(points, "{:.1},{:.1} ", x(step), y(of(step)));
            points
        })
    };
    let mean = |step: usize| {
        let last = &losses[(step + 1).saturating_sub(20)..=step];
        last.iter().sum::<f32>() / last.len() as f32
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for tick in 0..=most as usize {
        let at = y(tick as f32);
        let _ =
            writeln!(svg, "<path d=\"M{left} {at:.1}H{}\" stroke=\"#ddd\"/><text x=\"20\" y=\"{:.1}\">{tick}</text>", width - 10., at + 4.);
    }
    for part in 0..=4 {
        let step = steps * part / 4;
        let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>", x(step), height - 22., step + 1);
    }
    let _ =
        writeln!(svg, "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">step; loss in nats per character</text>", width / 2., height - 6.);
    let _ = writeln!(svg, "<polyline points=\"{}\" fill=\"none\" stroke=\"#9bc\"/>", line(&|step| losses[step]).trim_end());
    let _ = writeln!(svg, "<polyline points=\"{}\" fill=\"none\" stroke=\"#024\" stroke-width=\"2\"/>", line(&mean).trim_end());
    svg + "</svg>\n"
}
