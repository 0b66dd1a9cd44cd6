// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process_test

import (
	"context"
	"errors"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
)

// Config is the service's own part; log, socket and metrics come with the kit.
type Config struct {
	StateDir string        `config:"stateDir" help:"where the store is"`
	Interval time.Duration `config:"interval" help:"between two sweeps"`
}

func defaults(p instance.Paths) Config {
	return Config{StateDir: p.ServiceStateDir("example"), Interval: time.Minute}
}

// Validate says what no single value shows.
func (c *Config) Validate() error {
	var p config.Problems
	if c.Interval <= 0 {
		p.Addf("interval", "%s is not positive", c.Interval)
	}
	return p.Err()
}

type store struct{}

func openStore(string) (*store, error)                                { return &store{}, nil }
func (*store) Close() error                                           { return nil }
func (*store) Sweep(ctx context.Context, _ time.Duration) error       { <-ctx.Done(); return nil }
func (*store) server() grpc_health_v1.HealthServer                    { return health.NewServer() }
func register(r grpc.ServiceRegistrar, s grpc_health_v1.HealthServer) {}

// The main.go of a service.
func Example() {
	os.Exit(process.Run("example", defaults, run))
}

func run(ctx context.Context, p *process.Process, cfg Config) (err error) {
	st, err := process.Phase(p, "open store", func() (*store, error) { return openStore(cfg.StateDir) })
	if err != nil {
		return err
	}
	// Run ends the background work only after run returned; what the work uses
	// is closed by OnExit, in reverse order.
	p.OnExit(func() error { return errors.Join(st.Close()) })

	srv, err := p.NewServer(rpc.Options{
		Register: func(r grpc.ServiceRegistrar) { register(r, st.server()) },
		Methods:  rpc.Methods{
			// examplev1.Example_Write_FullMethodName: {Access: rpc.Root(), Limit: rpc.Limit{InFlight: 4, Waiting: 8}},
			// examplev1.Example_Read_FullMethodName:  {Access: rpc.Group()},
		},
	})
	if err != nil {
		return err
	}
	p.Go("sweep", func(ctx context.Context) error { return st.Sweep(ctx, cfg.Interval) })
	srv.SetAllServing(true) // when all sources are complete
	p.Ready()
	return p.Serve(ctx, srv)
}
