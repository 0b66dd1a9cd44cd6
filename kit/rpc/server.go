// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"buf.build/go/protovalidate"
	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/requestid"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/kit/rpc/rpcid"
)

// Maximum sizes of a request and of an answer, in bytes.
const (
	MaxRecv = 4 << 20
	MaxSend = 16 << 20
)

// MaxAlwaysStreams is the maximum number of concurrent streams of health and reflection of all
// callers except root together. A stream costs about 13 kB until the caller closes it, and a caller
// needs only one.
const MaxAlwaysStreams = 64

// Options describe a Server. Register and Methods are required.
type Options struct {
	// Register registers the services: func(r) { foov1.RegisterFooServiceServer(r, srv) }.
	Register func(grpc.ServiceRegistrar)
	// Methods must have a row for exactly the methods that Register adds.
	Methods Methods
	// AlsoRoot lists users that are treated as uid 0, for runs without root.
	AlsoRoot []uint32

	Logger     *slog.Logger          // nil for no log
	Registerer prometheus.Registerer // nil for no metrics
}

// Server is a gRPC server with the interceptors that the package comment describes.
type Server struct {
	grpc      *grpc.Server
	health    *health.Server
	log       *slog.Logger
	methods   Methods
	alsoRoot  []uint32
	named     []uint32 // users that the table names
	limiters  map[string]limiters
	always    limiters // limits the streams of health and reflection together
	validator protovalidate.Validator
	panics    prometheus.Counter

	stopping context.Context // ends streams; done when Shutdown begins
	stop     context.CancelFunc
}

// NewServer builds a server that does not serve yet. If the table and the registered methods
// differ, it fails with an error that lists the differences.
func NewServer(o Options) (*Server, error) {
	if o.Register == nil {
		return nil, errors.New("new gRPC server: Register is not set")
	}
	if o.Logger == nil {
		o.Logger = log.Discard()
	}
	validator, err := protovalidate.New()
	if err != nil {
		return nil, fmt.Errorf("new gRPC server: %w", err)
	}
	s := &Server{
		health:    health.NewServer(),
		log:       o.Logger,
		methods:   o.Methods,
		alsoRoot:  o.AlsoRoot,
		named:     o.Methods.named(),
		limiters:  map[string]limiters{},
		validator: validator,
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "grpc_server_panics_recovered_total",
			Help: "Handlers that panicked; each is a bug and its stack is in the log.",
		}),
	}
	for name, m := range o.Methods {
		s.limiters[name] = newLimiters(m.Limit)
	}
	s.always = limiters{others: newLimiter(Limit{InFlight: MaxAlwaysStreams, RetryAfter: time.Second})}
	s.stopping, s.stop = context.WithCancel(context.Background())

	metrics := grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram(
		grpcprom.WithHistogramBuckets([]float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30})))
	s.grpc = grpc.NewServer(append(s.chain(metrics),
		grpc.Creds(transportCredentials{}),
		grpc.MaxRecvMsgSize(MaxRecv),
		grpc.MaxSendMsgSize(MaxSend),
		grpc.MaxConcurrentStreams(256),
		grpc.MaxHeaderListSize(16<<10),
		grpc.ConnectionTimeout(10*time.Second),
		// A local peer that dies closes its socket; keepalive detects a peer that is stopped.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Minute, Timeout: 20 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
	)...)
	o.Register(s.grpc)
	for service := range s.grpc.GetServiceInfo() {
		s.health.SetServingStatus(service, grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	}
	s.health.SetServingStatus("", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	grpc_health_v1.RegisterHealthServer(s.grpc, s.health)
	reflection.Register(s.grpc)
	if err := o.Methods.check(s.grpc.GetServiceInfo()); err != nil {
		s.grpc.Stop()
		return nil, fmt.Errorf("new gRPC server: %w", err)
	}
	metrics.InitializeMetrics(s.grpc)
	if o.Registerer != nil {
		for _, c := range []prometheus.Collector{metrics, s.panics} {
			if err := o.Registerer.Register(c); err != nil {
				s.grpc.Stop()
				return nil, fmt.Errorf("new gRPC server: register metrics: %w", err)
			}
		}
	}
	return s, nil
}

// chain returns the interceptors, in the order in which calls pass them.
func (s *Server) chain(metrics *grpcprom.ServerMetrics) []grpc.ServerOption {
	logged := selector.MatchFunc(func(_ context.Context, c interceptors.CallMeta) bool { return !always(c.FullMethod()) })
	logOpts := []logging.Option{
		logging.WithLogOnEvents(logging.FinishCall),
		logging.WithLevels(levelOf),
		logging.WithDurationField(func(d time.Duration) logging.Fields {
			return logging.Fields{log.KeyDuration, d.String()}
		}),
		logging.WithFieldsFromContext(func(ctx context.Context) logging.Fields {
			if cred, ok := PeerCred(ctx); ok {
				return logging.Fields{log.KeyUID, cred.UID, "pid", cred.PID}
			}
			return nil
		}),
		logging.WithDisableLoggingFields(logging.SystemTag[0], logging.ComponentFieldKey,
			"protocol", "peer.address", "grpc.start_time", "grpc.request.deadline"),
	}
	logger := newFinishes(s.log)
	recoverOpt := recovery.WithRecoveryHandlerContext(s.recovered)
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(
			rpcid.UnaryServer(),
			metrics.UnaryServerInterceptor(),
			selector.UnaryServerInterceptor(logging.UnaryServerInterceptor(logger, logOpts...), logged),
			s.authUnary,
			s.limitUnary,
			s.validateUnary,
			recovery.UnaryServerInterceptor(recoverOpt),
		),
		grpc.ChainStreamInterceptor(
			rpcid.StreamServer(),
			metrics.StreamServerInterceptor(),
			selector.StreamServerInterceptor(logging.StreamServerInterceptor(logger, logOpts...), logged),
			s.drainStream,
			s.authStream,
			s.limitStream,
			s.validateStream,
			recovery.StreamServerInterceptor(recoverOpt),
		),
	}
}

// SetServing sets whether a service, given by its full proto name, is ready. The empty name is the
// process as a whole. Initially all are not ready.
func (s *Server) SetServing(service string, serving bool) {
	state := grpc_health_v1.HealthCheckResponse_NOT_SERVING
	if serving {
		state = grpc_health_v1.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus(service, state)
}

// SetAllServing sets whether all services and the process are ready.
func (s *Server) SetAllServing(serving bool) {
	for service := range s.grpc.GetServiceInfo() {
		if !always("/" + service + "/") {
			s.SetServing(service, serving)
		}
	}
	s.SetServing("", serving)
}

// Serving reports whether the process as a whole is ready.
func (s *Server) Serving() bool {
	r, err := s.health.Check(context.Background(), &grpc_health_v1.HealthCheckRequest{})
	return err == nil && r.GetStatus() == grpc_health_v1.HealthCheckResponse_SERVING
}

// Named returns the users that the table of methods names. They share root's limits, of methods
// and, through ListenOptions.Trusted, of connections.
func (s *Server) Named() []uint32 { return slices.Clone(s.named) }

// Serve serves on l until Shutdown or Stop, and then returns nil. It closes l.
func (s *Server) Serve(l net.Listener) error {
	var preparing sync.WaitGroup
	preparing.Go(s.prepare)
	defer preparing.Wait()
	err := s.grpc.Serve(l)
	if errors.Is(err, grpc.ErrServerStopped) {
		return nil
	}
	return err
}

// Shutdown reports NOT_SERVING, ends streams with UNAVAILABLE, accepts no more calls and waits for
// running calls until ctx ends. It then terminates the remaining calls and returns the context's
// error.
func (s *Server) Shutdown(ctx context.Context) error {
	s.health.Shutdown()
	s.stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.grpc.GracefulStop()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		s.grpc.Stop()
		<-done
		return fmt.Errorf("calls were terminated at shutdown: %w", ctx.Err())
	}
}

// Stop terminates all calls at once.
func (s *Server) Stop() {
	s.health.Shutdown()
	s.stop()
	s.grpc.Stop()
}

// recovered turns a panic into INTERNAL. The details go to the log and not to the caller.
func (s *Server) recovered(ctx context.Context, p any) error {
	s.panics.Inc()
	s.log.ErrorContext(ctx, "handler panicked", log.KeyError, fmt.Sprint(p), log.KeyStack, string(debug.Stack()))
	return rpcerr.New(codes.Internal, rpcerr.Panicked,
		errors.New("internal error; the log of the server has the details under this request id: "+requestid.From(ctx)))
}

// drainStream ends the context of a stream when the server shuts down. Watches do not end by
// themselves and would delay the shutdown.
func (s *Server) drainStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	ctx, cancel := context.WithCancel(ss.Context())
	defer cancel()
	defer context.AfterFunc(s.stopping, cancel)()
	err := next(srv, &drainingStream{ServerStream: ss, ctx: ctx, stopping: s.stopping, clientStream: info.IsClientStream})
	if s.stopping.Err() != nil && (status.Code(err) == codes.Canceled || errors.Is(err, context.Canceled)) {
		return errStopping
	}
	return err
}

var errStopping = rpcerr.New(codes.Unavailable, rpcerr.ShuttingDown, errors.New("the server is shutting down"))

type drainingStream struct {
	grpc.ServerStream
	ctx          context.Context
	stopping     context.Context
	clientStream bool // the client may send several messages, at any time
}

func (s *drainingStream) Context() context.Context { return s.ctx }

// RecvMsg returns when the server shuts down. RecvMsg of the underlying stream would wait for the client. The goroutine
// that still reads from it ends when the handler has returned, and its message is discarded.
func (s *drainingStream) RecvMsg(m any) error {
	if !s.clientStream {
		return s.ServerStream.RecvMsg(m)
	}
	received := make(chan error, 1)
	go func() { received <- s.ServerStream.RecvMsg(m) }()
	select {
	case err := <-received:
		return err
	case <-s.stopping.Done():
		return errStopping
	}
}

// levelOf returns info for errors of the caller and error for errors of the server.
func levelOf(code codes.Code) logging.Level {
	switch code {
	case codes.Unknown, codes.Internal, codes.DataLoss:
		return logging.LevelError
	case codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted:
		return logging.LevelWarn
	case codes.OK:
		return logging.LevelDebug
	default:
		return logging.LevelInfo
	}
}
