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

// Access defines who may call a method. The zero value allows no caller.
type Access struct {
	Root  bool     // uid 0 and Options.AlsoRoot
	Group bool     // every user who can connect to the socket
	UIDs  []uint32 // additional users
}

// Root allows uid 0 only.
func Root() Access { return Access{Root: true} }

// Group allows every user who can connect; the socket's mode limits that to root and the group.
func Group() Access { return Access{Root: true, Group: true} }

// RootAnd allows uid 0 and the given users.
func RootAnd(uids ...uint32) Access { return Access{Root: true, UIDs: uids} }

func (a Access) allows(uid uint32, alsoRoot []uint32) bool {
	return a.Group ||
		a.Root && isRoot(uid, alsoRoot) ||
		slices.Contains(a.UIDs, uid)
}

func isRoot(uid uint32, alsoRoot []uint32) bool { return uid == 0 || slices.Contains(alsoRoot, uid) }

// named returns the users that rows of the table list: users of services on which other processes depend.
func (m Methods) named() []uint32 {
	var uids []uint32
	for _, row := range m {
		uids = append(uids, row.Access.UIDs...)
	}
	slices.Sort(uids)
	return slices.Compact(uids)
}

// Method is the row of one method in a Server's table.
type Method struct {
	Access Access
	Limit  Limit // zero for no limit
	// Prepared means that the server compiles the request's validation rules when it starts. Otherwise the first
	// call compiles them, which takes 10 ms for the first message of a process. Compiled rules use memory.
	Prepared bool
}

// Methods maps full method names, "/package.Service/Method" as in the constants of generated code,
// to their rows.
type Methods map[string]Method

// always reports whether the method belongs to the health or the reflection service, which every server has.
func always(method string) bool {
	return strings.HasPrefix(method, "/"+grpc_health_v1.Health_ServiceDesc.ServiceName+"/") ||
		strings.HasPrefix(method, "/grpc.reflection.")
}

// check returns an error unless the table and the registered services have the same methods.
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
				errs = append(errs, fmt.Errorf("method %s is registered, and the table has no row for it", full))
				continue
			}
			if err := row.Limit.check(); err != nil {
				errs = append(errs, fmt.Errorf("method %s: %w", full, err))
			}
		}
	}
	for full := range m {
		if !known[full] {
			errs = append(errs, fmt.Errorf("method %s is in the table, but no registered service has it", full))
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
		return rpcerr.New(codes.PermissionDenied, rpcerr.NotPermitted, fmt.Errorf("no caller may call the method %s", method))
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
