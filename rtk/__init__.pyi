from . import compare as compare
from . import doctor as doctor
from . import errors as errors
from . import replay as replay
from . import serve as serve
from . import usage as usage
from . import widgets as widgets
from .client.generator import RemoteInferenceGenerator as RemoteInferenceGenerator
from .client.result import GenerateChunk as GenerateChunk
from .client.result import RemoteGenerateResult as RemoteGenerateResult
from .client.transport import RetryPolicy as RetryPolicy
from .client.transport import Timeouts as Timeouts
from .fleet import RemoteInferenceClient as RemoteInferenceClient
from .layout import ModelLayout as ModelLayout
from .loops import allow_nested_loops as allow_nested_loops
from .session import Session as Session
from .session import connect as connect
from .session.many import ManySamples as ManySamples
from .session.many import SampleFailure as SampleFailure
from .session.sample import Sample as Sample
from .session.samples_file import read_samples as read_samples
from .trace import RouteTrace as RouteTrace
from .trace import load_traces as load_traces
from .trace import save_traces as save_traces

__version__: str
