// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package process starts and stops a service.
//
// Run reads the configuration, sets up log, metrics and signals, and calls the service's main function. The service's
// own settings are in the same file and flags as the settings of Config. When main returns or a signal arrives, health
// turns to NOT_SERVING, running calls are completed within a time limit, and background work is stopped, in this order.
// The exit code reports the result.
package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/health"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/version"
)

// Exit codes of Run.
const (
	ExitOK     = 0
	ExitFailed = 1 // main returned an error
	ExitUsage  = 2 // the configuration or the machine is wrong; a restart will not help
)

// Misconfigured wraps an error of main that a restart cannot fix: an operator must change a setting, a mount or a
// permission. Run then returns ExitUsage.
func Misconfigured(err error) error {
	if err == nil {
		return nil
	}
	return &misconfigured{err}
}

type misconfigured struct{ error }

func (m *misconfigured) Unwrap() error { return m.error }

// ErrBackground is wrapped by the error of Serve if work started by Go ended before it was stopped.
var ErrBackground = errors.New("background work ended")

// Process is passed to the main function of a service.
type Process struct {
	Service string
	Paths   instance.Paths
	Config  Config
	// Effective has all settings, including the service's own, without secrets.
	Effective *config.Effective
	Log       *slog.Logger
	// LogLevel is the level of Log.
	LogLevel *log.Switch
	// Metrics is the registry for the service's own metrics: sluice_<service>_<noun>_<unit>.
	Metrics *prometheus.Registry

	started     time.Time
	descriptors uint64 // RLIMIT_NOFILE
	phases      *prometheus.GaugeVec
	ready       prometheus.Gauge
	dial        []grpc.DialOption // count calls to other services
	sandbox     *prometheus.GaugeVec
	confined    bool     // Confine restricts file access
	missing     []string // missing layers of the sandbox, and why; final after Confine has returned

	server  atomic.Pointer[rpc.Server] // set once it serves
	waiting atomic.Pointer[string]     // what the process waits for while the server does not serve
	unready atomic.Pointer[error]      // why /readyz reports an error although the server serves
	standby atomic.Bool                // the server intentionally does not serve: the process is a standby

	work    context.Context // context of the background work; outlives the servers
	endWork context.CancelCauseFunc
	wg      sync.WaitGroup
	failed  chan error // the first failure of background work
	onExit  []func() error
}

type settings[C any] struct {
	Process Config `config:",inline"`
	Service C      `config:",inline"`
}

func settingsOf[C any](service string, defaults func(instance.Paths) C) func(instance.Paths) settings[C] {
	return func(p instance.Paths) settings[C] {
		return settings[C]{Process: defaultConfig(p, service), Service: defaults(p)}
	}
}

// Reference returns the Markdown table of all settings of a service, the common ones first.
func Reference[C any](service string, defaults func(instance.Paths) C) (string, error) {
	return config.Markdown(service, func(p instance.Paths) settings[C] {
		s := settingsOf(service, defaults)(p)
		s.Process.Socket.Group = int64(instance.GroupID) // so that the table does not depend on the user who runs the generator
		return s
	})
}

// Run runs a service until SIGTERM, SIGINT or an error, and returns its exit code:
// os.Exit(process.Run("name", defaults, run)). The context passed to main ends with the first
// signal; a second signal ends the process at once.
//
// Before Run calls main, and before it opens anything except the configuration and the health port, it drops all
// privileges that are not requested by an option.
func Run[C any](service string, defaults func(instance.Paths) C, main func(context.Context, *Process, C) error,
	options ...Option,
) int {
	r := &rights{}
	for _, o := range options {
		o(r)
	}
	return run(environment{args: os.Args[1:], environ: os.Environ(), stdout: os.Stdout, stderr: os.Stderr, rights: r},
		service, defaults, main)
}

// OneShot is implemented by a pointer to a configuration that can request a one-time run which
// inspects something and exits. Such a run may happen while the service runs, so it opens no socket
// and serves no metrics.
type OneShot interface{ OneShot() bool }

type environment struct {
	args    []string
	environ []string
	stdout  io.Writer
	stderr  io.Writer
	root    string          // prepended to every default path
	rights  *rights         // privileges to keep; nil changes nothing
	ctx     context.Context // cancelling it ends the process like a signal; may be nil
}

func run[C any](env environment, service string, defaults func(instance.Paths) C,
	main func(context.Context, *Process, C) error,
) int {
	started := time.Now()
	cfg, effective, err := config.Load(config.Options{
		Service: service, Args: env.args, Environ: env.environ, Output: env.stdout,
		Version: version.Get().String(), Root: env.root,
	}, settingsOf(service, defaults))
	switch {
	case errors.Is(err, config.ErrHelp), errors.Is(err, config.ErrPrinted):
		return ExitOK
	case err != nil:
		for _, problem := range config.All(err) {
			fmt.Fprintf(env.stderr, "sluice-%s: %v\n", service, problem)
		}
		return ExitUsage
	}

	level := log.NewSwitch(cfg.Process.Log.Level)
	logger := log.New(env.stderr, level).With(log.KeyService, service)
	if effective.Paths.Name != "" {
		logger = logger.With(log.KeyInstance, effective.Paths.Name)
	}
	if err := fault.Arm(); err != nil {
		logger.Error("fault points refused", log.Err(err))
		return ExitUsage
	}
	cfg.Process.Runtime.apply()

	parent := env.ctx
	if parent == nil {
		parent = context.Background()
	}
	ctx, stop := signal.NotifyContext(parent, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	// After the first signal, the next one has its default effect.
	defer context.AfterFunc(ctx, stop)()

	p := &Process{
		Service: service, Paths: effective.Paths, Config: cfg.Process, Effective: effective, Log: logger,
		LogLevel: level, Metrics: prometheus.NewRegistry(), started: started, failed: make(chan error, 1),
	}
	p.work, p.endWork = context.WithCancelCause(context.WithoutCancel(ctx))
	defer p.endWork(nil)
	logger.Info("starting", log.KeyVersion, version.Get().String(), "go", runtime.Version(), "pid", os.Getpid(),
		"uid", os.Geteuid(), "config", effective)
	if also := cfg.Process.Socket.AlsoRoot; len(also) > 0 {
		logger.Warn("users other than root may call methods that are restricted to root", "users", also)
	}
	if err := roomForThreads(logger); err != nil {
		logger.Error("start", log.Err(err))
		return ExitFailed
	}
	o, ok := any(&cfg.Service).(OneShot)
	stopServing, err := p.start(env.rights, &cfg.Service, !ok || !o.OneShot())
	defer stopServing()
	if err != nil {
		logger.Error("start", log.Err(err))
		return ExitFailed
	}

	err = main(ctx, p, cfg.Service)
	p.endWork(nil)
	if p.waitWork(cfg.Process.ShutdownTimeout) {
		for _, f := range slices.Backward(p.onExit) {
			err = errors.Join(err, f())
		}
	} else { // background work still uses these resources, so they cannot be closed
		err = errors.Join(err, fmt.Errorf("background work did not stop within %s", cfg.Process.ShutdownTimeout))
	}
	if err != nil && !(ctx.Err() != nil && onlyCanceled(err)) {
		logger.Error("stopped", log.Err(err), log.KeyDuration, time.Since(started).String())
		if m := (*misconfigured)(nil); errors.As(err, &m) {
			return ExitUsage
		}
		return ExitFailed
	}
	logger.Info("stopped", log.KeyDuration, time.Since(started).String())
	return ExitOK
}

// start drops all privileges that are not in rights and, if the process serves, opens the health and metrics ports.
// service is the service's configuration. stop closes what start opened, also after an error.
func (p *Process) start(rights *rights, service any, serves bool) (stop func(), err error) {
	var opened []func()
	stop = func() {
		for _, closing := range slices.Backward(opened) {
			closing()
		}
	}
	if p.descriptors, err = descriptorLimit(); err != nil {
		return stop, err
	}
	if err := p.registerMetrics(); err != nil {
		return stop, err
	}
	if rights != nil {
		if err := p.Phase("privileges", func() (err error) {
			p.confined, err = rights.take(p.Log)
			return err
		}); err != nil {
			return stop, err
		}
	}
	if serves && !p.Config.Health.off() {
		// The health port must be opened before the system call filter is installed, which forbids internet
		// sockets.
		l, err := health.Listen(p.Config.Health.Address)
		if err != nil {
			return stop, err
		}
		opened = append(opened, health.Serve(l, p.notReady, p.Log))
	}
	if p.confined {
		if err := p.Phase("restrict system calls", func() error { return p.restrictCalls(service) }); err != nil {
			return stop, err
		}
	}
	if serves {
		stopMetrics, err := p.serveMetrics()
		if err != nil {
			return stop, err
		}
		opened = append(opened, stopMetrics)
	}
	return stop, nil
}

// onlyCanceled reports whether the error consists of nothing but context.Canceled.
func onlyCanceled(err error) bool {
	joined, ok := err.(interface{ Unwrap() []error }) //nolint:errorlint // checks this error itself, not what it wraps
	if !ok {
		return errors.Is(err, context.Canceled)
	}
	return !slices.ContainsFunc(joined.Unwrap(), func(e error) bool { return !onlyCanceled(e) })
}

func (p *Process) name(metric string) string {
	return "sluice_" + strings.ReplaceAll(p.Service, "-", "_") + "_" + metric
}

func (p *Process) registerMetrics() error {
	p.phases = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: p.name("start_phase_seconds"), Help: "How long each phase of the last start took.",
	}, []string{"phase"})
	p.ready = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: p.name("ready_seconds"), Help: "From the start of the process until it was ready; 0 before.",
	})
	p.sandbox = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: p.name("sandbox_enforced"),
		Help: "1 if the kernel enforces this layer of the sandbox, 0 if it does not have it.",
	}, []string{"layer"})
	v := version.Get()
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: p.name("build_info"), Help: "1, with the version in the labels.",
		ConstLabels: prometheus.Labels{"version": v.Version, "revision": v.Revision, "go": runtime.Version()},
	})
	info.Set(1)
	for _, c := range []prometheus.Collector{
		p.phases, p.ready, p.sandbox, info,
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	} {
		if err := p.Metrics.Register(c); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	var err error
	p.dial, err = rpc.ClientMetrics(p.Metrics)
	return err
}

// Dial returns a connection to the socket of another service; it is closed when the process ends.
// Calls are counted in grpc_client_…. Calls without a deadline get the timeout, 10 s if 0.
func (p *Process) Dial(path string, timeout time.Duration) (*grpc.ClientConn, error) {
	conn, err := client.Dial(path, client.Options{Timeout: timeout, Dial: p.dial})
	if err == nil {
		p.OnExit(conn.Close)
	}
	return conn, err
}

// Phase runs one step of the start-up, and logs and counts its duration. Its error names the phase.
func (p *Process) Phase(name string, f func() error) error {
	p.Waiting("starting: " + name)
	began := time.Now()
	err := f()
	took := time.Since(began)
	p.phases.WithLabelValues(name).Set(took.Seconds())
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	p.Log.Info("start phase done", log.KeyPhase, name, log.KeyDuration, took.String())
	return nil
}

// Phase is Process.Phase for a step that returns a value.
func Phase[T any](p *Process, name string, f func() (T, error)) (T, error) {
	var v T
	err := p.Phase(name, func() (err error) {
		v, err = f()
		return err
	})
	return v, err
}

// Waiting sets the text that /readyz returns until the server serves, and again whenever it stops serving: the
// condition that the process waits for.
func (p *Process) Waiting(what string) { p.waiting.Store(&what) }

// Unready makes /readyz report an error although the server serves, for example because another service is unavailable
// and all calls therefore wait or fail. Nil clears the error.
func (p *Process) Unready(why error) {
	if why == nil {
		p.unready.Store(nil)
		return
	}
	p.unready.Store(&why)
}

// Standby makes /readyz report no error while the server does not serve: the process waits to take the place of another
// one.
func (p *Process) Standby(yes bool) { p.standby.Store(yes) }

// notReady returns why the process does not serve, or nil.
func (p *Process) notReady() error {
	if p.standby.Load() {
		return nil
	}
	if s := p.server.Load(); s != nil && s.Serving() {
		if why := p.unready.Load(); why != nil {
			return *why
		}
		return nil
	}
	if what := p.waiting.Load(); what != nil {
		return errors.New(*what)
	}
	return errors.New("starting")
}

// Ready marks the end of the start-up. From then on, the process returns unused memory to the kernel: once for the
// start-up, and after each burst of work.
func (p *Process) Ready() {
	took := time.Since(p.started)
	p.ready.Set(took.Seconds())
	p.Log.Info("ready", log.KeyDuration, took.String())
	p.wg.Go(p.watchMemory)
}

// OnExit adds a step that runs after the servers and the background work have stopped, in the reverse order of the
// calls of OnExit. If the work does not stop in time, no step runs. Use it for resources that servers and background
// work share: a deferred call in main would run while background work still runs. Not safe for concurrent use.
func (p *Process) OnExit(f func() error) { p.onExit = append(p.onExit, f) }

// Go starts background work. Its context ends after the servers have stopped. If f returns before
// that, Serve returns its error.
func (p *Process) Go(name string, f func(context.Context) error) {
	p.wg.Go(func() {
		err := f(p.work)
		if p.work.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("it returned without an error")
		}
		select {
		case p.failed <- fmt.Errorf("%w: %s: %w", ErrBackground, name, err):
		default: // only the first error is reported
			p.Log.Error("background work ended", "work", name, log.Err(err))
		}
	})
}

func (p *Process) waitWork(timeout time.Duration) bool {
	done := make(chan struct{})
	go func() { defer close(done); p.wg.Wait() }()
	select {
	case <-done:
		return true
	case <-time.After(timeout):
		return false
	}
}

// NewServer is rpc.NewServer with the process's log and metrics.
func (p *Process) NewServer(o rpc.Options) (*rpc.Server, error) {
	if o.Logger == nil {
		o.Logger = p.Log
	}
	if o.Registerer == nil {
		o.Registerer = p.Metrics
	}
	o.AlsoRoot = append(o.AlsoRoot, p.Config.Socket.AlsoRoot...)
	return rpc.NewServer(o)
}

// Listen opens the service's socket as configured. It may be called once. Trusted users share the
// connections that are reserved for root.
func (p *Process) Listen(trusted ...uint32) (*rpc.Listener, error) {
	open, err := openDescriptors()
	if err != nil {
		return nil, err
	}
	metrics := 0
	if p.Config.Metrics.Address != "off" {
		metrics = metricsConnections(p.descriptors)
	}
	conns, scarce := socketConnections(p.descriptors, open, metrics)
	o := p.Config.Socket.listenOptions(conns)
	o.Trusted = trusted
	l, err := rpc.Listen(p.Config.Socket.Path, o)
	if err != nil {
		return nil, err
	}
	p.Log.Info("listening", log.KeySocket, p.Config.Socket.Path, "connections", conns, "descriptors", p.descriptors,
		"open", open)
	if scarce {
		p.Log.Warn("few descriptors: calls may fail while connections are open; raise RLIMIT_NOFILE",
			"descriptors", p.descriptors, "open", open, "connections", conns)
	}
	for _, c := range []prometheus.Collector{
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: p.name("socket_connections"), Help: "Connections that are open on the service's socket.",
		}, func() float64 { open, _ := l.Conns(); return float64(open) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: p.name("socket_refused_connections_total"),
			Help: "Connections closed at once because too many were open, of all users or of one.",
		}, func() float64 { _, refused := l.Conns(); return float64(refused) }),
	} {
		if err := p.Metrics.Register(c); err != nil {
			return nil, errors.Join(fmt.Errorf("register metrics: %w", err), l.Close())
		}
	}
	return l, nil
}

// Serve serves on the service's socket until ctx ends or background work fails, then shuts the
// server down in order. The server reports NOT_SERVING until its SetServing or SetAllServing is
// called.
func (p *Process) Serve(ctx context.Context, s *rpc.Server) error {
	l, err := p.Listen(s.Named()...)
	if err != nil {
		s.Stop()
		return err
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	p.server.Store(s)
	var cause error
	select {
	case err := <-served:
		s.Stop()
		return fmt.Errorf("serve %s: %w", p.Config.Socket.Path, err)
	case cause = <-p.failed:
	case <-ctx.Done():
	}
	p.Waiting("stopping")
	p.Log.Info("stopping", "cause", causeOf(ctx, cause))
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.Config.ShutdownTimeout)
	defer cancel()
	if err := s.Shutdown(bounded); err != nil {
		p.Log.Warn("shutdown", log.Err(err))
	}
	return errors.Join(cause, <-served)
}

// Wait is Serve for a process without a server.
func (p *Process) Wait(ctx context.Context) error {
	select {
	case err := <-p.failed:
		return err
	case <-ctx.Done():
		return nil
	}
}

func causeOf(ctx context.Context, err error) string {
	if err != nil {
		return err.Error()
	}
	return context.Cause(ctx).Error()
}
