// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
)

// Access says who may call a method. The zero value lets nobody.
type Access struct {
	Root  bool     // uid 0 and Options.AlsoRoot
	Group bool     // everybody who could connect to the socket
	UIDs  []uint32 // these as well
}

// Root lets uid 0 call, and nobody else.
func Root() Access { return Access{Root: true} }

// Group lets everybody call who could connect, which the socket's mode limits
// to root and the group.
func Group() Access { return Access{Root: true, Group: true} }

// RootAnd lets uid 0 and the given users call.
func RootAnd(uids ...uint32) Access { return Access{Root: true, UIDs: uids} }

func (a Access) allows(uid uint32, alsoRoot []uint32) bool {
	return a.Group ||
		a.Root && isRoot(uid, alsoRoot) ||
		slices.Contains(a.UIDs, uid)
}

func isRoot(uid uint32, alsoRoot []uint32) bool { return uid == 0 || slices.Contains(alsoRoot, uid) }

// named lists the users that some row names: services that others wait for.
func (m Methods) named() []uint32 {
	var uids []uint32
	for _, row := range m {
		uids = append(uids, row.Access.UIDs...)
	}
	slices.Sort(uids)
	return slices.Compact(uids)
}

// Method is the row of one method in the table of a Server.
type Method struct {
	Access Access
	Limit  Limit // none if zero
	// Prepared has the rules of the request compiled when the server begins to
	// serve. Otherwise the first call waits for that, 10 ms for the first message of
	// a process; what is compiled costs memory.
	Prepared bool
}

// Methods is keyed by the full method name, as generated code has it in
// constants: "/package.Service/Method".
type Methods map[string]Method

// always are served beside what Register adds.
func always(method string) bool {
	return strings.HasPrefix(method, "/"+grpc_health_v1.Health_ServiceDesc.ServiceName+"/") ||
		strings.HasPrefix(method, "/grpc.reflection.")
}

// check compares the table with what is registered: each must have the other.
func (m Methods) check(services map[string]grpc.ServiceInfo) error {
	var errs []error
	known := map[string]bool{}
	for service, info := range services {
		for _, method := range info.Methods {
			full := "/" + service + "/" + method.Name
			if always(full) {
				continue
			}
			known[full] = true
			row, ok := m[full]
			if !ok {
				errs = append(errs, fmt.Errorf("method %s is registered, and the table does not say who may call it", full))
				continue
			}
			if err := row.Limit.check(); err != nil {
				errs = append(errs, fmt.Errorf("method %s: %w", full, err))
			}
		}
	}
	for full := range m {
		if !known[full] {
			errs = append(errs, fmt.Errorf("method %s is in the table, and no registered service has it", full))
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

func (s *Server) authorise(ctx context.Context, method string) error {
	if always(method) {
		return nil
	}
	row, ok := s.methods[method]
	if !ok {
		return rpcerr.New(codes.PermissionDenied, rpcerr.NotPermitted, fmt.Errorf("the method %s is for no caller", method))
	}
	cred, ok := PeerCred(ctx)
	if !ok {
		return rpcerr.New(codes.Unauthenticated, rpcerr.NoCredentials, fmt.Errorf("the caller of %s has no peer credentials", method))
	}
	if !row.Access.allows(cred.UID, s.alsoRoot) {
		return rpcerr.New(codes.PermissionDenied, rpcerr.NotPermitted, fmt.Errorf("uid %d may not call %s", cred.UID, method))
	}
	return nil
}

func (s *Server) authUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := s.authorise(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return next(ctx, req)
}

func (s *Server) authStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if err := s.authorise(ss.Context(), info.FullMethod); err != nil {
		return err
	}
	return next(srv, ss)
}
