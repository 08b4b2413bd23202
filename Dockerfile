# flannel's image: docker build -t localhost/flannel:v0.1.0 .
#
# One image for all containers of deploy/kube-flannel.yml; paths are those of Go flannel's two images. Debian, and not a static daemon
# alone, since rules in iptables, which are the default, need its programs; only what is copied onto hosts is static.
FROM rust:1.95-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libprotobuf-dev protobuf-compiler
WORKDIR /src
COPY . .
ARG FLANNEL_COMMIT=
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    deploy/build-image-root.sh /image

FROM debian:bookworm-slim
# The iptables of the hosts: nft, or legacy where `iptables --version` says legacy there.
ARG IPTABLES=nft
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates iptables \
    && rm -rf /var/lib/apt/lists/* \
    && update-alternatives --set iptables "/usr/sbin/iptables-$IPTABLES" \
    && update-alternatives --set ip6tables "/usr/sbin/ip6tables-$IPTABLES"
COPY --from=build /image/ /
ENV PATH=/opt/bin:/usr/sbin:/usr/bin:/sbin:/bin
# The memory of thousands of peers that arrive at once goes back to the system (glibc).
ENV MALLOC_MMAP_THRESHOLD_=131072 MALLOC_ARENA_MAX=1
# Root, since the directories of the host belong to it mostly, but without a capability that the manifest does not add: NET_ADMIN and
# NET_RAW for flanneld, DAC_OVERRIDE for install-conf.
ENTRYPOINT ["/opt/bin/flanneld"]
