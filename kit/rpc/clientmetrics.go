// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"fmt"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
)

// ClientMetrics registers counters for the calls that this process makes, and returns the options
// that count them, for client.Options.Dial. Call it once per process and pass the result to every
// connection.
func ClientMetrics(reg prometheus.Registerer) ([]grpc.DialOption, error) {
	m := grpcprom.NewClientMetrics()
	if err := reg.Register(m); err != nil {
		return nil, fmt.Errorf("register client metrics: %w", err)
	}
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(m.UnaryClientInterceptor()),
		grpc.WithChainStreamInterceptor(m.StreamClientInterceptor()),
	}, nil
}
