//! A cuDNN pass for positive scales, with another executor for other scales. The scale is a value of the call, so executor selection cannot know it.

use crate::cudnn::unsupported::check_scale;
use crate::error::Error;
use crate::executor::{Executor, Prepared, PreparedBackward, Report};
use crate::host::{HostBackward, HostForward};
use std::fmt::{Debug, Formatter, Result as Formatted};
use std::sync::{Arc, OnceLock};

/// Finds an executor, or returns why it is missing.
pub(crate) type Find = Box<dyn Fn() -> Result<Arc<dyn Executor>, Error> + Send + Sync>;

type Prepare<P> = dyn Fn(&dyn Executor) -> Result<Arc<P>, Error> + Send + Sync;

/// A pass that cuDNN prepared. A call whose scale is 0 or below goes to the first other executor that supports the problem, which is prepared on the
/// first such call.
pub(crate) struct AnyScale<P: ?Sized> {
    positive: Arc<P>,
    other: OnceLock<Arc<P>>,
    executors: Vec<Find>,
    prepare: Box<Prepare<P>>,
}

impl<P: ?Sized> AnyScale<P> {
    pub(crate) fn new(
        positive: Arc<P>,
        executors: Vec<Find>,
        prepare: impl Fn(&dyn Executor) -> Result<Arc<P>, Error> + Send + Sync + 'static,
    ) -> AnyScale<P> {
        AnyScale { positive, other: OnceLock::new(), executors, prepare: Box::new(prepare) }
    }

    fn pass_for(&self, attn_scale: Option<f32>) -> Result<&P, Error> {
        let Some(Err(refused)) = attn_scale.map(check_scale) else { return Ok(&self.positive) };
        if let Some(other) = self.other.get() {
            return Ok(other);
        }
        for find in &self.executors {
            match find().and_then(|executor| (self.prepare)(&*executor)) {
                Ok(pass) => return Ok(self.other.get_or_init(|| pass)),
                Err(Error::Unsupported(why)) => tracing::debug!(%why, "unsupported"),
                Err(error) => return Err(error),
            }
        }
        Err(refused.into())
    }
}

impl<P: ?Sized + Debug> Debug for AnyScale<P> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Formatted {
        f.debug_struct("AnyScale").field("positive", &self.positive).field("other", &self.other).finish_non_exhaustive()
    }
}

impl Prepared for AnyScale<dyn Prepared> {
    fn forward(&self, call: HostForward<'_>) -> Result<Report, Error> {
        self.pass_for(call.attn_scale)?.forward(call)
    }
}

impl PreparedBackward for AnyScale<dyn PreparedBackward> {
    fn backward(&self, call: HostBackward<'_>) -> Result<Report, Error> {
        self.pass_for(call.attn_scale)?.backward(call)
    }
}
