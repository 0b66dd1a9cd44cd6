// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process_test

import (
	"context"
	"os"
	"time"

	"google.golang.org/grpc"
	pb "google.golang.org/grpc/interop/grpc_testing"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
)

// Config has the service's own settings; settings of log, socket and metrics are added by package
// process.
type Config struct {
	StateDir string        `config:"stateDir" help:"where the store is"`
	Interval time.Duration `config:"interval" help:"between two sweeps"`
}

func defaults(p instance.Paths) Config {
	return Config{StateDir: p.ServiceStateDir("example"), Interval: time.Minute}
}

// Validate checks rules across several settings.
func (c *Config) Validate() error {
	var p config.Problems
	if c.Interval <= 0 {
		p.Addf("interval", "%s is not positive", c.Interval)
	}
	return p.Err()
}

type store struct{}

func openStore(string) (*store, error)                               { return &store{}, nil }
func (*store) Close() error                                          { return nil }
func (*store) SweepEvery(ctx context.Context, _ time.Duration) error { <-ctx.Done(); return nil }

// server is the gRPC side of the core; this example uses grpc's own test service.
type server struct {
	pb.UnimplementedTestServiceServer
	store *store
}

// methods defines who may call each method, and its limits.
func methods() rpc.Methods {
	return rpc.Methods{
		pb.TestService_EmptyCall_FullMethodName:           {Access: rpc.Group()},
		pb.TestService_UnaryCall_FullMethodName:           {Access: rpc.Root(), Limit: rpc.Limit{InFlight: 4, Waiting: 8}},
		pb.TestService_CacheableUnaryCall_FullMethodName:  {Access: rpc.RootAnd(instance.FirstServiceID)},
		pb.TestService_StreamingOutputCall_FullMethodName: {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 64}},
		pb.TestService_StreamingInputCall_FullMethodName:  {Access: rpc.Root()},
		pb.TestService_FullDuplexCall_FullMethodName:      {Access: rpc.Root()},
		pb.TestService_HalfDuplexCall_FullMethodName:      {Access: rpc.Root()},
		pb.TestService_UnimplementedCall_FullMethodName:   {}, // no caller is allowed
	}
}

// A service's main.go looks like this.
func Example() {
	os.Exit(process.Run("example", defaults, run))
}

func run(ctx context.Context, p *process.Process, cfg Config) error {
	st, err := process.Phase(p, "open store", func() (*store, error) { return openStore(cfg.StateDir) })
	if err != nil {
		return err
	}
	p.OnExit(st.Close)

	srv, err := p.NewServer(rpc.Options{
		Register: func(r grpc.ServiceRegistrar) { pb.RegisterTestServiceServer(r, &server{store: st}) },
		Methods:  methods(),
	})
	if err != nil {
		return err
	}
	p.Go("sweep", func(ctx context.Context) error { return st.SweepEvery(ctx, cfg.Interval) })

	srv.SetAllServing(true) // as soon as all sources are complete
	p.Ready()
	return p.Serve(ctx, srv)
}
